"""Ways of running a section's graph: as it is, compiled, or with its backward in two halves.

In: a section's graph module. Out: one that computes the same bits, or the finding that it does not.
"""
