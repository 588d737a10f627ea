"""What a rank's keeper has of it at any moment of a step: its state, and sums of gradients, by the engine's pace."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.extras.replay.job import state_bytes
from varuna.schedule.copy_pace import CopyPace, copying_s, last_sums_s, state_copying_s, sums_pace, sums_pause_s


class StateCopies:
    """Copies of all ranks' states in the steps of a generation.

    Args:
        state_bytes: by rank.
        sums_bytes: likewise, if sums are copied as well.
        link_bytes_per_s: of the link to its keeper.
        step_s: how long a whole step takes.
    """

    def __init__(
        self, state_bytes: Sequence[int], sums_bytes: Sequence[int], link_bytes_per_s: float, step_s: float
    ) -> None:
        self._sums_bytes, self._link_bytes_per_s = sums_bytes, link_bytes_per_s
        self._whole = [False] * len(state_bytes)
        self._copying_s = [state_copying_s(size, link_bytes_per_s, step_s) for size in state_bytes]
        self._paces = [CopyPace() for _ in state_bytes]
        self._begun, self._after_s = [False] * len(state_bytes), 0.0

    def begin(self, after_s: float = 0.0) -> None:
        """A step begins; the state is there ``after_s`` later."""
        self._begun, self._after_s = [pace.begins() for pace in self._paces], after_s

    def end(self, step_s: float) -> None:
        """The step ended after ``step_s``."""
        ranks = zip(self._paces, self._begun, self._copying_s, self._sums_bytes, strict=True)
        for rank, (pace, begun, each_s, sums_bytes) in enumerate(ranks):
            complete = begun and self._after_s + each_s <= step_s
            if begun:
                pace.ended(each_s if complete else None, step_s)
            self._whole[rank] = complete and last_sums_s(sums_bytes, self._link_bytes_per_s, step_s) > 0

    def complete_s(self, rank: int) -> float:
        """When a rank's copy is complete, in seconds since the step's begin; infinite: none is made."""
        return self._after_s + self._copying_s[rank] if self._begun[rank] else float("inf")

    def is_makeable(self, rank: int) -> bool:
        """Whether a rank's keeper can make the update before this step again."""
        return self._whole[rank]


def state_copies(plan: Plan, job: JobFacts, link_bytes_per_s: float) -> StateCopies:
    """Copies of the states of a plan's ranks, none of which has any bytes where sums alone are copied."""
    each_bytes, has_state = state_bytes(job), plan.copies is Copies.STATE
    ranks = [plan.sections_at(rank) for rank in range(plan.workers)]
    return StateCopies(
        [sum(each_bytes[section] for section in own) if has_state else 0 for own in ranks],
        [sum(job.model.sections[section].summed_bytes for section in own) for own in ranks],
        link_bytes_per_s,
        plan.step_s,
    )


class CopiedSum(NamedTuple):
    """A copy of a section's sum."""

    section: int
    taken_s: float
    """what was added by then is in it; seconds since the step's begin"""
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
