"""Times a model's sections on this worker's device.

In: a captured job (``engine.stage.job.Job``). Out: samples of F, R and B by section and micro-batch size, taken in the
engine's own stage; ``quick`` makes a calibration of them within seconds.
"""
