"""Analysis of a loss: operations that mix the examples of a batch, and counts by which its terms are divided.

In: a captured graph. Out: the graph with each term divided by a count of the whole batch, or a refusal that names the
operation. Reads graphs, runs nothing but ``unknown_operations``.
"""
