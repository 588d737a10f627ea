"""Advice on models that have regions of autocast."""

from collections.abc import Iterable

_REGION = "wrap_with_autocast"


def without_autocast(operations: Iterable[str]) -> str:
    """Advise to leave autocast out; empty if no operation is a region of it.

    Args:
        operations: names of those of a graph.
    """
    if _REGION not in operations:
        return ""
    return (
        "Part of it is computed within torch.autocast, which Varuna does not look into, and where sums over "
        "micro-batches are rounded otherwise than sums over the batch: leave torch.autocast out of forward() and "
        'loss=, and pass precision="bf16" to varuna.Trainer. '
    )
