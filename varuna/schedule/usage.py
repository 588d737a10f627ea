"""The usage of memory by a stage that runs an order: inputs in flight, and sets of activations."""

from collections.abc import Sequence
from typing import NamedTuple

from varuna.schedule.actions import Action, Kind

_BACKWARD_ENDS = (Kind.BACKWARD, Kind.WEIGHT)


class Usage(NamedTuple):
    """The most that a stage holds at any time."""

    stash: int
    """Micro-batches whose forward is done and whose backward is not."""
    live: int
    """Sets of activations, recomputed or kept, until the end of their backward."""


def usage(row: Sequence[Action]) -> Usage:
    """Find the peaks over a row. A micro-batch without an R has kept its activations since its F."""
    keeps = kept(row)
    stash = live = stash_peak = live_peak = 0
    for _, kind, micro_batch in row:
        # I frees nothing: its W still needs the input and the activations.
        if kind in _BACKWARD_ENDS:
            stash -= 1
            live -= 1
            continue
        if kind is Kind.FORWARD:
            stash += 1
            stash_peak = max(stash_peak, stash)
        if kind is Kind.RECOMPUTE or (kind is Kind.FORWARD and micro_batch in keeps):
            live += 1
            live_peak = max(live_peak, live)
    return Usage(stash_peak, live_peak)


def kept(row: Sequence[Action]) -> frozenset[int]:
    """Find the micro-batches that have no R, since they keep their activations from F to the end of their backward."""
    forwards = {action.micro_batch for action in row if action.kind is Kind.FORWARD}
    return frozenset(forwards.difference(action.micro_batch for action in row if action.kind is Kind.RECOMPUTE))
