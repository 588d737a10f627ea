"""Copy of a rank's sums of gradients that its keeper has at any moment of a step, by the engine's pace."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from varuna.schedule.copy_pace import copying_s, sums_pace, sums_pause_s


class CopiedSum(NamedTuple):
    """A copy of a section's sum."""

    section: int
    taken_s: float
    """seconds since the step's begin; sums that were added by then are in it"""
    complete_s: float


def copied_sums(
    added_s: Sequence[float],
    sizes: Mapping[int, int],
    *,
    state_complete_s: float,
    link_bytes_per_s: float,
    step_s: float,
    goes_on: bool,
    until_s: float,
) -> Iterator[CopiedSum]:
    """Copies of a stage's sums that are complete by ``until_s``, as ``engine.copies.sending`` makes them.

    A section's sum is taken when something was just added to it.

    Args:
        added_s: when micro-batches were added, ascending.
        sizes: bytes of each section's sums.
        state_complete_s: when the state's copy was.
        link_bytes_per_s: of the link to the keeper.
        step_s: how long the step takes.
        goes_on: something is in the sums from the beginning, so that the first round begins at once.
        until_s: when the owner or its keeper stopped.
    """
    size_bytes = sum(sizes.values())
    pace = sums_pace(step_s - state_complete_s, size_bytes, copying_s(size_bytes, link_bytes_per_s))
    now_s, position = state_complete_s + (0.0 if goes_on else pace.every_s), 0
    while now_s <= until_s:
        began_s = now_s
        for section, size in sizes.items():
            while position < len(added_s) and added_s[position] < now_s:
                position += 1
            if position == len(added_s):
                return
            taken_s = added_s[position]
            now_s = taken_s + copying_s(size, link_bytes_per_s)
            if now_s > until_s:
                return
            yield CopiedSum(section, taken_s, now_s)
        now_s += sums_pause_s(pace, now_s - began_s)
