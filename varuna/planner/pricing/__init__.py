"""The cost of a plan: seconds and bytes of its stages and links, and the predicted time of a step.

In: a calibration at one micro-batch size, a span of sections or a plan. Out: the simulator's input and its answer.
"""
