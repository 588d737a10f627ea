"""A captured graph, read: what its ops cost, what depends on what, and what can go.

In: an ``fx`` graph. Out: facts about its nodes, the same on every machine.
"""
