"""Machines before a run, measured against each other: the first one listens, the others come to it.

In: a JOIN string. Out: the facts of all machines, at the first one.
"""
