"""A second home: each rank's sums of gradients, and state that is nowhere else, in the memory of another rank.

In: a stage whose state rests between two updates, and a group that reaches another rank. Out: that rank's copies, with
the step that they are of, which a next generation may begin from.
"""
