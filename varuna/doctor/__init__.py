"""A running job, checked from outside: whether what Varuna promises holds.

In: a run's folder and its manager's address. Out: findings, each with what was seen and what to do. It changes nothing.
"""
