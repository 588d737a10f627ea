"""Micro-batches in sums of gradients, and those that must run again after a loss of a worker. Pure.

A worker that stops in the middle of a step holds, for each of its sections, the sum of the gradients of some
micro-batches. Of each section disjoint sums are chosen, at most one of each rank; where that rank no longer runs the
section, its sum goes to one that does. A worker may also have the copy of another one's sum: a candidate like any
other, which overlaps with that one's own if it is still there. So are sums in a store, beside the checkpoint that their
step began from, once the run begins there again. A micro-batch that is in the chosen sums of every
section does not run again. All others do, through all stages; a section that has one already does not add it again.

    2 x 2, micro-batches 0-2 on replica 0, 3-5 on replica 1; rank 2 (stage 0 of replica 1) is lost:

    j                           0  1  2  3  4  5
    section 0, sum of rank 0    x  .  .
    section 0, sum of rank 2             (lost)
    section 1, sum of rank 1    x  x  .
    section 1, sum of rank 3             x  .  .
    runs again                     *  *  *  *  *    of 1 and 3, section 1 drops the gradients: it has them

Micro-batches have their numbers j in the global batch, from 0. Sets of them are ranges [first, end).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pydantic import Field

from varuna.core.dealing import ends_of_shares
from varuna.core.model import ModelFacts
from varuna.core.plan import Plan
from varuna.core.value import Value

EndsOf = Callable[[int], Sequence[int]]
"""By number of micro-batches: where each replica's share ends, after a 0."""

IndexSet = tuple[tuple[int, int], ...]
"""A set of micro-batches: ranges [first, end), ascending, none touching another."""


def spans_of(numbers: Iterable[int]) -> IndexSet:
    """Return a set of numbers as spans."""
    return union([((number, number + 1),) for number in numbers])


def numbers_of(spans: IndexSet) -> list[int]:
    """Return the numbers of a set, ascending."""
    return [number for first, end in spans for number in range(first, end)]


def count(spans: IndexSet) -> int:
    """Count the numbers in a set."""
    return sum(end - first for first, end in spans)


def union(sets: Iterable[IndexSet]) -> IndexSet:
    """Return the numbers that are in any of the sets."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(span for spans in sets for span in spans):
        # Ranges that touch become one, so that equal sets are equal tuples.
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)


def without(spans: IndexSet, taken: IndexSet) -> IndexSet:
    """Return the numbers that are in the first set and not in the second."""
    left: list[tuple[int, int]] = []
    for first, end in spans:
        for start, stop in taken:
            if stop > first and start < end:
                if first < start:
                    left.append((first, start))
                first = min(stop, end)
        if first < end:
            left.append((first, end))
    return tuple(left)


def overlap(one: IndexSet, other: IndexSet) -> bool:
    """Return whether a number is in both sets."""
    return count(union([one, other])) < count(one) + count(other)


def is_within(spans: IndexSet, micro_batches: int) -> bool:
    """Return whether spans from outside are not empty, ascending, not touching, and of a step's micro-batches."""
    bounds = [-1, *(bound for span in spans for bound in span)]
    return all(a < b for a, b in pairwise(bounds)) and bounds[-1] <= micro_batches


_NOBODY = -1
"""In place of a rank: the sum is in a file."""


class SumLocation(NamedTuple):
    """The location of a section's sum: a rank has its own, and may keep a copy of another one's; or a file has it."""

    rank: int
    copied: bool = False
    file: str = ""


SumsAt = Mapping[SumLocation, IndexSet]
"""Sums of one section: what is in each."""


def choose_sums(offered: SumsAt, seats: Sequence[int]) -> dict[SumLocation, IndexSet]:
    """Choose disjoint sums of one section: the largest first, among equals one that need not move, and no copy.

    A sum that is reduced over the replicas has all micro-batches, so it is chosen alone.

    Args:
        offered: by place.
        seats: ranks that run the section from now on.
    """
    chosen: dict[SumLocation, IndexSet] = {}
    for at in sorted(offered, key=lambda at: (-count(offered[at]), at.rank not in seats, at.copied, at.rank, at.file)):
        if offered[at] and not any(overlap(offered[at], other) for other in chosen.values()):
            chosen[at] = offered[at]
    return dict(sorted(chosen.items()))


def deal(spans: IndexSet, replicas: int, ends_of: EndsOf | None = None) -> tuple[IndexSet, ...]:
    """Divide a set into contiguous shares, ascending: as ``ends_of`` says of their number, or all as large."""
    numbers = numbers_of(spans)
    ends = ends_of_shares(len(numbers), replicas) if ends_of is None else ends_of(len(numbers))
    return tuple(spans_of(numbers[first:end]) for first, end in pairwise(ends))


def square_sum(spans: IndexSet) -> int:
    """Return the sum of (j + 1)^2: with the count, it shows that a micro-batch is missing or was added twice."""

    def below(end: int) -> int:
        # 1^2 + ... + end^2, so that a range costs no loop.
        return end * (end + 1) * (2 * end + 1) // 6

    return sum(below(end) - below(first) for first, end in spans)


class SectionSum(Value):
    """A section's sum of gradients, by the micro-batches in it."""

    section: int
    micro_batches: IndexSet


class InheritedSum(SectionSum):
    """Part of the sum that a rank resumes from."""

    source_rank: int = Field(ge=0, description="who has it: the rank itself, or one that sends it")
    copied: bool = Field(default=False, description="it is the copy of another rank's sum that the source kept")
    file: str = Field(default="", description="that the source reads it from, beside the checkpoint; empty: it has it")


class MicroBatchLoss(Value):
    """The last stage's record of a micro-batch: weighted loss, weight, metric sums."""

    micro_batch: int
    values: tuple[float, ...]


class HeldSums(Value):
    """Sums and losses of a step that a worker has, if it stopped in the middle."""

    micro_batch: int = Field(ge=1, description="m: what the numbers of micro-batches mean")
    sections: tuple[SectionSum, ...] = Field(description="its own")
    copies: tuple[SectionSum, ...] = Field(default=(), description="of another rank's sums, that it keeps")
    without: tuple[int, ...] = Field(default=(), description="sections that have no gradients")
    losses: tuple[MicroBatchLoss, ...] = Field(default=(), description="by the last stage")


class StoredSum(SectionSum):
    """A section's sum of gradients that is durable, in the folder of the checkpoint that its step began from."""

    file: str


class StoredSums(Value):
    """Sums and losses that a store has of the step after a checkpoint."""

    micro_batch: int = Field(ge=1, description="m: what the numbers of micro-batches mean")
    sums: tuple[StoredSum, ...]
    losses: tuple[MicroBatchLoss, ...] = Field(description="that are known, by micro-batch")


def joined(parts: Sequence[HeldSums]) -> HeldSums | None:
    """Join all that a worker has of a step; None: nothing."""
    if not parts:
        return None
    losses = {each.micro_batch: each for part in parts for each in part.losses}
    return HeldSums(
        micro_batch=parts[0].micro_batch,
        sections=tuple(each for part in parts for each in part.sections),
        copies=tuple(each for part in parts for each in part.copies),
        without=tuple(sorted({section for part in parts for section in part.without})),
        losses=tuple(losses[number] for number in sorted(losses)),
    )


class StepAssignment(Value):
    """A rank's work in a broken step, and the sums that it has already: for the first step of a generation."""

    work: IndexSet = Field(description="micro-batches that its replica runs")
    taken: tuple[InheritedSum, ...] = Field(description="sums that it resumes from; others of its own are void")
    kept: tuple[SectionSum, ...] = Field(description="of its sections: what the sums of some replica contain")
    losses: tuple[MicroBatchLoss, ...] = Field(
        default=(), description="for ranks of the last stage: of the micro-batches that do not run again"
    )


class RemainingWork(Value):
    """The work that is left of a broken step, and the sums from which a generation resumes it."""

    micro_batches: int = Field(ge=1, description="of the step")
    taken: tuple[tuple[InheritedSum, ...], ...] = Field(
        description="by rank of the grid: the chosen sums, of each section in the order in which they are added"
    )
    work: tuple[IndexSet, ...] = Field(description="by replica: the micro-batches that run; never none")

    @property
    def kept(self) -> int:
        """Number of micro-batches that do not run again."""
        return self.micro_batches - sum(count(spans) for spans in self.work)

    def sentence(self, step: int, *, stored: bool) -> str:
        """Describe the rest of a step for a log; ``stored``: the sums were saved."""
        where = " that were saved during it" if stored else ""
        return f"kept {self.kept} of {self.micro_batches} micro-batches of step {step}{where}; the others run again"

    def kept_of(self, section: int) -> IndexSet:
        """Return the micro-batches that the chosen sums of a section contain."""
        return union([each.micro_batches for sums in self.taken for each in sums if each.section == section])

    def rest_of(self, plan: Plan, rank: int, losses: Sequence[MicroBatchLoss]) -> StepAssignment | None:
        """Return the assignment of one rank; None: it is a spare.

        Args:
            plan: of the generation.
            rank: its own.
            losses: that are known, for ranks of the last stage.
        """
        if rank >= plan.workers:
            return None
        sections, again = plan.sections_at(rank), set(numbers_of(union(self.work)))
        known = losses if sections.stop == plan.sections else ()
        return StepAssignment(
            work=self.work[plan.place_of(rank).replica],
            taken=self.taken[rank],
            kept=tuple(SectionSum(section=each, micro_batches=self.kept_of(each)) for each in sections),
            losses=tuple(loss for loss in known if loss.micro_batch not in again),
        )


def remainder(
    micro_batches: int,
    replicas: int,
    seats: Mapping[int, Sequence[int]],
    offered: Mapping[int, SumsAt],
    losses: IndexSet,
    *,
    ends_of: EndsOf | None = None,
) -> RemainingWork | None:
    """Find the work that is left of a broken step; None: all of it, so that no sum is worth keeping.

    Args:
        micro_batches: of the step.
        replicas: of the new plan; each gets at least one micro-batch, if need be one that no section lacks.
        seats: by section: the ranks that run it by the new plan.
        offered: by section that has gradients: the sums that there are; of ranks without that seat, if they may move.
        losses: micro-batches whose losses are known.
        ends_of: how the new plan deals micro-batches, by their number, ``Plan.ends_of``; None: in equal shares.
    """
    everything: IndexSet = ((0, micro_batches),)
    chosen = {section: choose_sums(sums, seats[section]) for section, sums in sorted(offered.items())}
    # One section that lacks a micro-batch is enough: its gradient comes from B, which needs all stages.
    lacking = union([without(everything, union(sums.values())) for sums in chosen.values()])
    # Without its loss the step's mean would lack it, although its gradients are there.
    again = union([lacking, without(everything, losses)])
    if count(again) < replicas:
        # Each replica needs one: the last backward of each starts the reduction of a section.
        spare = numbers_of(without(everything, again))[: replicas - count(again)]
        again = union([again, spans_of(spare)])
    if count(again) >= micro_batches:
        return None
    taken = _seated(chosen, seats, without(everything, again))
    return RemainingWork(micro_batches=micro_batches, taken=taken, work=deal(again, replicas, ends_of))


def _seated(
    chosen: Mapping[int, SumsAt], seats: Mapping[int, Sequence[int]], spared: IndexSet
) -> tuple[tuple[InheritedSum, ...], ...]:
    """Return, by rank, the sums that it resumes from; one moves only if it spares work, to the rank with fewest."""
    taken: list[list[InheritedSum]] = [[] for _ in range(1 + max(rank for ranks in seats.values() for rank in ranks))]
    arrivals = [0] * len(taken)
    for section, sums in chosen.items():
        for (source, copied, file), spans in sums.items():
            target = source
            if source not in seats[section]:
                if not overlap(spans, spared):
                    continue
                target = min(seats[section], key=lambda rank: (arrivals[rank], rank))
                arrivals[target] += 1
            # A file is read by the rank that resumes from it; a sum of another rank is sent by that one.
            reader = target if file else source
            taken[target].append(
                InheritedSum(section=section, micro_batches=spans, source_rank=reader, copied=copied, file=file)
            )
    return tuple(map(tuple, taken))


def remainder_of_stored(stored: StoredSums | None, plan: Plan, model: ModelFacts) -> RemainingWork | None:
    """Find the work that is left of a step, by a plan that begins from its checkpoint; None: all of it.

    Args:
        stored: what the store has of it, if anything.
        plan: of a generation whose ranks have no sums themselves.
        model: says which sections have gradients.
    """
    if stored is None or stored.micro_batch != plan.micro_batch:
        return None
    summed = [section for section, facts in enumerate(model.sections) if facts.summed_bytes]
    offered: dict[int, dict[SumLocation, IndexSet]] = {section: {} for section in summed}
    for each in stored.sums:
        if each.section in offered and is_within(each.micro_batches, plan.micro_batches):
            offered[each.section][SumLocation(_NOBODY, file=each.file)] = each.micro_batches
    seats = {section: plan.homes_of(section) for section in range(plan.sections)}
    known = spans_of(loss.micro_batch for loss in stored.losses)
    return remainder(plan.micro_batches, plan.replicas, seats, offered, known, ends_of=plan.ends_of)
