"""The order in which a pipeline runs micro-batches that take unlike times. Pure.

Stages that wait for their first micro-batch wait least for short ones, and what is long should not come last. The rule
was found with the simulator (docs/schedules.md).
"""

from collections.abc import Sequence

_SHALLOW = 3
"""Up to this many stages are full so soon that short micro-batches are worth more at the end."""


def by_work(work: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return positions of micro-batches in the order in which a pipeline should run them.

    It fills with the shortest, one for each stage, ascending; then the longest come first. Equal ones stay in order.

    Args:
        work: by micro-batch, in any unit.
        stages: of the pipeline; with one, the order is as given.
    """
    if stages == 1:
        return tuple(range(len(work)))
    # Both sorts are stable: each stage sorts for itself, and all must come to the same order.
    ascending = sorted(range(len(work)), key=lambda position: work[position])
    filling = ascending[: stages if stages > _SHALLOW else 0]
    rest = sorted(ascending[len(filling) :], key=lambda position: -work[position])
    return (*filling, *rest)
