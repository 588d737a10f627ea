"""Sources of a run's first values: the constructor, each parameter's own draws, or a checkpoint's tensors.

In: the captured model, a choice. Out: parameters and buffers of the sections that a rank holds, never a whole model.
"""
