"""Links and groups between the ranks of a generation.

In: tensors of one cut. Out: the same on the neighbour, as one contiguous message, on threads of their own; all-reduces
over the replicas of a stage. Groups are abandoned rather than destroyed.
"""
