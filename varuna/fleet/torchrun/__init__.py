"""torchrun's agents as machines of a run: ``torchrun --rdzv-backend=varuna``. torchrun itself is met in ``membership``.

In: reports of nodes. Out: the world that they are in, and when it ends.
"""
