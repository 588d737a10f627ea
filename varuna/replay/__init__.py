"""How a run would have done on a recorded cluster: the real state machine and planner, in virtual time.

In: a trace of nodes that come and go, a calibration, costs of a morph or a restart. Out: samples per second and plans
over time, as figures or a picture.
"""
