"""Measures what a calibration is made of, on this machine's workers.

In: a user's script and the workers of this machine or cluster. Out: samples of F, R, B, optimizer steps, messages and
all-reduces (``varuna.calibration.samples``), taken with the engine's own stages and links.
"""
