"""The question that the planner is asked, and its answer.

In: a calibration, the workers, and what the user fixed. Out: plans with their predictions, best first, and why others
are missing.
"""
