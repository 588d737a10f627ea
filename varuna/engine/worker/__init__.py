"""A worker's life: generations, one after another, and the steps in between.

In: assignments of a ``Membership``, a job. Out: votes, saved shards, the losses of each step. Everything that only one
generation needs is made in ``forming`` and given up with it.
"""
