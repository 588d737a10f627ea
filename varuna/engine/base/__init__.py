"""What the engine stands on: the one place where a training thread waits, how long, and c10d behind a seam.

In: arrivals of all threads. Out: one event at a time, or an error that names rank, stage, step and action.
"""
