"""Chooses P, D and m for the workers that there are, and says why.

In: a ``PlanRequest``: a calibration, workers, memory. Out: a ranking of plans, with the reason why each other one lost.
"""
