"""A living run, looked at from outside: what its promises say should hold, and whether it does.

In: a run's folder and its manager's address. Out: findings, each with what was seen and what to do. It changes nothing.
"""
