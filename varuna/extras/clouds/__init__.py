"""For people who rent machines in groups: AWS, Azure, Google Cloud, Kubernetes.

In: a requested number of nodes. Out: calls of a cloud's API. A group is an engine of ``varuna run --on``.
"""
