"""A second home: state and sums of each stage in the memory of another rank, where every section has one holder.

In: a stage whose state rests between two updates, and a group that reaches another rank. Out: that rank's copy of it,
with the step that it is of, which a next generation may begin from.
"""
