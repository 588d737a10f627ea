"""For people whose scripts stay under torchrun (``--rdzv-backend=varuna``): its agents as machines of a run.

In: reports of nodes. Out: the world that they are in, and when it ends.
"""
