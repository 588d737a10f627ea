"""For people who operate runs: machines before a run, and a run from outside. Does what Varuna promises hold?

In: a run's folder and its manager's address. Out: findings, each with what was seen and what to do. It changes nothing.
"""
