"""Detection of this process's membership: the manager's, torchrun's, or its own."""

import os

from varuna.core.errors import UsageError
from varuna.core.units import parse_bytes
from varuna.membership.static import StaticMembership, world_from_environment
from varuna.planner.choose import Flags, planner


def solo_from_environment() -> StaticMembership:
    """Membership for ``python train.py`` and ``torchrun train.py``.

    Reads ``VARUNA_STAGES``, ``VARUNA_MEMORY_PER_WORKER`` and ``VARUNA_NEW`` (``1``, or ``overwrite``).
    """
    stages = os.environ.get("VARUNA_STAGES")
    memory = os.environ.get("VARUNA_MEMORY_PER_WORKER")
    new = os.environ.get("VARUNA_NEW", "")
    if stages and not (stages.isdecimal() and int(stages) > 0):
        raise UsageError(f"VARUNA_STAGES={stages} must be a number of stages, at least 1. Unset it for any number.")
    if new not in ("", "1", "overwrite"):
        raise UsageError(
            f"VARUNA_NEW={new} must be 1 (start afresh) or overwrite (and move old checkpoints aside). Unset it to "
            "resume."
        )
    memory_bytes = parse_bytes(memory, "VARUNA_MEMORY_PER_WORKER") if memory else None
    flags = Flags(memory="VARUNA_MEMORY_PER_WORKER", stages="VARUNA_STAGES")
    plan = planner(memory_bytes=memory_bytes, stages=int(stages) if stages else None, flags=flags, copies=False)
    return StaticMembership(
        world_from_environment(),
        lambda job, workers, micro_batch: plan(job, workers, micro_batch, None),
        plans_from=lambda known: lambda job, workers, micro_batch: plan(job, workers, micro_batch, known),
        new=bool(new),
        overwrite=new == "overwrite",
    )
