"""For people who choose machines: a recorded cluster in virtual time, around the real state machine and planner.

In: a trace of nodes that come and go, a calibration, costs of a morph or a restart. Out: samples per second and plans
over time, as figures or a picture.
"""
