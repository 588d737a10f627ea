"""Sums that survive a loss: sets of micro-batches, and the proof by brute force that each is added exactly once."""

import random
from collections.abc import Mapping
from itertools import combinations, product

import pytest

from varuna.core.sums import (
    IndexSet,
    SumLocation,
    choose_sums,
    count,
    deal,
    is_within,
    numbers_of,
    overlap,
    remainder,
    spans_of,
    square_sum,
    union,
    without,
)


def test_spans_are_sets() -> None:
    choices = random.Random(0)
    for _ in range(300):
        one, other = ({choices.randrange(12) for _ in range(choices.randrange(10))} for _ in range(2))
        a, b = spans_of(one), spans_of(other)
        assert numbers_of(a) == sorted(one)
        assert count(a) == len(one)
        assert union([a, b]) == spans_of(one | other)
        assert without(a, b) == spans_of(one - other)
        assert overlap(a, b) == bool(one & other)
        assert square_sum(a) == sum((number + 1) ** 2 for number in one)
        assert is_within(a, 12)
        assert is_within(b, 12)


@pytest.mark.parametrize(
    "spans", [((-1, 2),), ((2, 2),), ((3, 5), (4, 6)), ((3, 5), (5, 6)), ((4, 6), (0, 1)), ((0, 10),)]
)
def test_spans_from_outside_are_looked_at(spans: IndexSet) -> None:
    assert not is_within(spans, 9)


def own(sums: Mapping[int, IndexSet]) -> dict[SumLocation, IndexSet]:
    """Each rank's own sums."""
    return {SumLocation(rank): spans for rank, spans in sums.items()}


def test_a_reduced_sum_is_chosen_alone() -> None:
    full: IndexSet = ((0, 9),)
    sums = own({3: full, 1: full, 2: ((0, 4),)})
    assert choose_sums(sums, seats=(1, 2, 3)) == own({1: full})
    assert choose_sums(sums, seats=(2, 3)) == own({3: full}), "it need not move"


def test_of_overlapping_sums_the_smaller_is_dropped() -> None:
    sums = own({0: ((0, 2),), 1: ((1, 4),), 2: ((5, 6),), 3: ()})
    assert choose_sums(sums, seats=()) == own({1: ((1, 4),), 2: ((5, 6),)})


def test_a_copy_counts_where_the_sum_is_lost_that_it_is_of() -> None:
    """Rank 1 keeps a copy of what rank 0 had, which runs the same section."""
    copy, mine = SumLocation(1, copied=True), SumLocation(1)
    alive: dict[SumLocation, IndexSet] = {SumLocation(0): ((0, 4),), mine: ((9, 12),), copy: ((0, 3),)}
    assert choose_sums(alive, seats=(0, 1)) == {SumLocation(0): ((0, 4),), mine: ((9, 12),)}
    dead = {at: spans for at, spans in alive.items() if at.rank}
    assert choose_sums(dead, seats=(1,)) == {mine: ((9, 12),), copy: ((0, 3),)}
    assert choose_sums({SumLocation(0): ((0, 4),), copy: ((0, 4),)}, seats=(0, 1)) == {SumLocation(0): ((0, 4),)}, (
        "as old as its own"
    )
    found = remainder(12, 1, {0: [1]}, {0: dead}, losses=((0, 12),))
    assert found is not None
    assert found.work == (((3, 9),),)
    assert [(each.source_rank, each.copied, each.micro_batches) for each in found.taken[1]] == [
        (1, False, ((9, 12),)),
        (1, True, ((0, 3),)),
    ]


def test_shares_are_even_and_ascending() -> None:
    assert deal(((0, 3), (5, 7)), 2) == (((0, 3),), ((5, 7),))
    assert deal(((0, 3), (5, 9)), 3) == (((0, 3),), ((5, 7),), ((7, 9),))


def test_a_micro_batch_whose_loss_is_lost_runs_again() -> None:
    found = remainder(6, 1, {0: [0]}, {0: own({0: ((0, 6),)})}, losses=((0, 4),))
    assert found is not None
    assert found.work == (((4, 6),),)
    assert found.kept == 4


def test_every_replica_gets_something_to_do() -> None:
    found = remainder(6, 3, {0: range(3)}, {0: own({1: ((0, 6),)})}, losses=((0, 6),))
    assert found is not None
    assert found.work == (((0, 1),), ((1, 2),), ((2, 3),))


def test_nothing_is_kept_if_every_micro_batch_lacks_somewhere() -> None:
    assert remainder(4, 1, {0: [0], 1: [1]}, {0: own({0: ((0, 4),)}), 1: {}}, losses=((0, 4),)) is None


_GRIDS = {"2x2": [[0, 2], [1, 3]], "2x1": [[0], [1]], "1x2": [[0, 1], [0, 1]], "1x1": [[0], [0]]}
"""By section, the ranks that run it."""


@pytest.mark.parametrize("shape", _GRIDS)
def test_each_micro_batch_is_added_exactly_once_whatever_is_held(shape: str) -> None:
    """2 stages of a section each, 2 replicas, 3 micro-batches: every loss, and every set that each may hold."""
    seats, replicas = dict(enumerate(_GRIDS[shape])), int(shape[-1])
    everything: IndexSet = ((0, 3),)
    shares = [(), ((0, 1),), ((1, 2),), ((0, 2),), everything], [(), ((2, 3),), everything]
    cases = 0
    for dead, moves, losses in product([None, 0, 1, 2, 3], [True, False], _subsets(3)):
        for sums in product(shares[0], shares[0], shares[1], shares[1]):
            by_section = {
                section: {
                    rank: spans
                    for rank, spans in list(enumerate(sums))[section::2]
                    if rank != dead and (moves or rank in seats[section])
                }
                for section in (0, 1)
            }
            found = remainder(3, replicas, seats, {each: own(sums) for each, sums in by_section.items()}, losses)
            common = set(range(3)) & set(numbers_of(losses))
            for by_rank in by_section.values():
                common &= {number for spans in by_rank.values() for number in numbers_of(spans)}
            if found is None:
                assert len(common) == 0 or replicas > 3 - len(common)
                continue
            cases += 1
            again = [number for spans in found.work for number in numbers_of(spans)]
            assert len(again) == len(set(again)), "no micro-batch runs twice"
            assert all(found.work), "every replica has one to run"
            assert set(again) | set(numbers_of(losses)) == {0, 1, 2}, "every loss is known in the end"
            assert found.kept == 3 - len(again)
            for section, by_rank in by_section.items():
                added = [number for number in again if not overlap(((number, number + 1),), found.kept_of(section))]
                for rank, each in ((rank, each) for rank, own in enumerate(found.taken) for each in own):
                    if each.section == section:
                        assert rank in seats[section], "who holds it runs the section"
                        assert each.micro_batches == by_rank[each.source_rank]
                        added += numbers_of(each.micro_batches)
                assert sorted(added) == [0, 1, 2]
    assert cases > 500


def _subsets(end: int) -> list[IndexSet]:
    return [spans_of(chosen) for size in range(end + 1) for chosen in combinations(range(end), size)]


class Worker:
    """The contents of one rank's sums, as a multiset that could go wrong."""

    def __init__(self, sections: range) -> None:
        self.sums: dict[int, list[int]] = {section: [] for section in sections}
        self.sent: dict[int, list[int]] = {section: [] for section in sections}
        """copies of them that its keeper has"""

    def held(self, at: SumLocation, section: int, owners: Mapping["Worker", "Worker"]) -> list[int]:
        """A sum that it has: its own, or what the one that it keeps copies of has sent."""
        return owners[self].sent[section] if at.copied else self.sums[section]


def test_each_micro_batch_is_added_exactly_once_whatever_dies() -> None:
    """Histories with up to three losses, each at a random point, under plans of changing depth and width."""
    choices = random.Random(1)
    kept_at_all = moved = copied = 0
    for _ in range(300):
        micro_batches, sections = choices.randrange(6, 14), 4
        replicas, stages = choices.choice([2, 3]), choices.choice([1, 2, 4])
        work = deal(((0, micro_batches),), replicas)
        grid = _grid(replicas, stages, sections)
        kept: list[IndexSet] = [()] * sections
        losses: set[int] = set()
        for _ in range(choices.randrange(1, 4)):
            _run(choices, grid, work, kept, losses, part=choices.random())
            replicas, stages = (
                choices.choice([1, 2, 3]),
                stages if choices.random() < 0.7 else choices.choice([1, 2, 4]),
            )
            old, grid = grid, _grid(replicas, stages, sections)
            offered: dict[int, dict[SumLocation, IndexSet]] = {section: {} for section in range(sections)}
            shift = choices.randrange(len(old))
            owners = {keeper: old[number - shift] for number, keeper in enumerate(old)} if shift else {}
            survivors = choices.sample(old, max(1, len(old) - 1))
            ranks = choices.sample(range(len(grid)), min(len(grid), len(survivors)))
            ranks += range(len(grid), len(grid) + len(survivors) - len(ranks))  # spares, which leave the grid
            sources = dict(zip(ranks, survivors, strict=True))
            moves = choices.random() < 0.5
            for rank, source in sources.items():
                here = {SumLocation(rank): source.sums}
                if source in owners:
                    here[SumLocation(rank, copied=True)] = owners[source].sent
                for at, section in ((at, section) for at, sums in here.items() for section in sums):
                    if moves or (rank < len(grid) and section in grid[rank].sums):
                        offered[section][at] = spans_of(here[at][section])
            seats = {
                section: [rank for rank, worker in enumerate(grid) if section in worker.sums]
                for section in range(sections)
            }
            known = spans_of({j for j in losses if choices.random() < 0.9})
            found = remainder(micro_batches, replicas, seats, offered, known)
            losses = set(numbers_of(known))
            if found is None:
                work, kept, losses = deal(((0, micro_batches),), replicas), [()] * sections, set()
                continue
            kept_at_all += found.kept
            moved += sum(each.source_rank != rank for rank, sums in enumerate(found.taken) for each in sums)
            work, kept = found.work, [found.kept_of(section) for section in range(sections)]
            for rank, sums in enumerate(found.taken):
                for each in sums:
                    source = sources[each.source_rank]
                    held = source.held(SumLocation(rank, each.copied), each.section, owners)
                    assert each.source_rank == rank or rank in seats[each.section]
                    assert each.micro_batches == spans_of(held)
                    grid[rank].sums[each.section] += held
                    copied += each.copied
        _run(choices, grid, work, kept, losses, part=1.0)
        for section in range(sections):
            added = [j for worker in grid for j in worker.sums.get(section, [])]
            assert sorted(added) == list(range(micro_batches))
        assert losses == set(range(micro_batches))
    assert kept_at_all > 200
    assert moved > 100
    assert copied > 50


def _grid(replicas: int, stages: int, sections: int) -> list[Worker]:
    share = sections // stages
    return [Worker(range(k * share, (k + 1) * share)) for _ in range(replicas) for k in range(stages)]


def _run(
    choices: random.Random,
    grid: list[Worker],
    work: tuple[IndexSet, ...],
    kept: list[IndexSet],
    losses: set[int],
    *,
    part: float,
) -> None:
    """Each worker gets through some of its replica's work; if all of a section is done, it may be reduced."""
    stages = len(grid) // len(work)
    for rank, worker in enumerate(grid):
        mine = numbers_of(work[rank // stages])
        for section, sums in worker.sums.items():
            through = mine if part == 1.0 else mine[: choices.randrange(len(mine) + 1)]
            inherited = len(sums)
            sums += [j for j in through if not overlap(((j, j + 1),), kept[section])]
            worker.sent[section] = sums[: choices.randint(inherited, len(sums))]
            if section == len(kept) - 1:
                losses.update(through)
    for section in range(len(kept)):
        holders = [worker for worker in grid if section in worker.sums]
        everything = sorted(j for worker in holders for j in worker.sums[section])
        if part < 1.0 and everything == list(range(kept_end(work, kept))) and choices.random() < 0.5:
            for worker in holders:  # some have heard of it, some not yet
                if choices.random() < 0.7:
                    worker.sums[section] = list(everything)


def kept_end(work: tuple[IndexSet, ...], kept: list[IndexSet]) -> int:
    """Number of micro-batches: the end of the last one that is kept or runs."""
    return max(end for spans in (*work, *kept) for _, end in spans)
