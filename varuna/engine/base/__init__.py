"""The engine's foundation: the one place where a training thread waits, bounds of waits, and torch's c10d.

In: arrivals of all threads. Out: one event at a time, or an error that names rank, stage, step and action.
"""
