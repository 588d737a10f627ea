"""Finds hidden dependencies between sections (paper §"Tracking cross-partition dependencies").

In: a partitioned model, the user's optimizer and hooks. Out: what a section reads of another one outside of the graph,
with the line of the user's code.
"""
