"""For people who have a Ray cluster: an actor for each node, and one for the manager.

In: a requested number of nodes, and an agent's command. Out: calls of Ray.
"""
