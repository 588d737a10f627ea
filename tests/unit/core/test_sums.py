"""Sums that survive a loss: sets of micro-batches, and the proof by brute force that each is added exactly once."""

import random

import pytest

from varuna.core.sums import (
    SectionSum,
    Spans,
    choose,
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
def test_spans_from_outside_are_looked_at(spans: Spans) -> None:
    assert not is_within(spans, 9)


def test_a_reduced_sum_is_chosen_alone() -> None:
    assert choose({3: ((0, 9),), 1: ((0, 9),), 2: ((0, 4),)}) == {1: ((0, 9),)}


def test_of_overlapping_sums_the_smaller_is_dropped() -> None:
    assert choose({0: ((0, 2),), 1: ((1, 4),), 2: ((5, 6),), 3: ()}) == {1: ((1, 4),), 2: ((5, 6),)}


def test_shares_are_even_and_ascending() -> None:
    assert deal(((0, 3), (5, 7)), 2) == (((0, 3),), ((5, 7),))
    assert deal(((0, 3), (5, 9)), 3) == (((0, 3),), ((5, 7),), ((7, 9),))


def test_a_micro_batch_whose_loss_is_lost_runs_again() -> None:
    found = remainder(6, 1, 1, {0: {0: ((0, 6),)}}, losses=((0, 4),))
    assert found is not None
    assert found.work == (((4, 6),),)
    assert found.kept == 4


def test_every_replica_gets_something_to_do() -> None:
    found = remainder(6, 3, 3, {0: {1: ((0, 6),)}}, losses=((0, 6),))
    assert found is not None
    assert found.work == (((0, 1),), ((1, 2),), ((2, 3),))


def test_nothing_is_kept_if_every_micro_batch_lacks_somewhere() -> None:
    assert remainder(4, 1, 2, {0: {0: ((0, 4),)}, 1: {}}, losses=((0, 4),)) is None


class Worker:
    """What one rank's sums contain, as a multiset that could go wrong."""

    def __init__(self, sections: range) -> None:
        self.sums: dict[int, list[int]] = {section: [] for section in sections}

    def spans(self, section: int) -> Spans:
        return spans_of(self.sums[section])


def test_each_micro_batch_is_added_exactly_once_whatever_dies() -> None:
    """Histories with up to three losses, each at a random point, under plans of changing depth and width."""
    choices = random.Random(1)
    kept_at_all = 0
    for _ in range(300):
        micro_batches, sections = choices.randrange(6, 14), 4
        replicas, stages = choices.choice([2, 3]), choices.choice([1, 2, 4])
        work = deal(((0, micro_batches),), replicas)
        grid = _grid(replicas, stages, sections)
        kept: list[Spans] = [()] * sections
        losses: set[int] = set()
        for _ in range(choices.randrange(1, 4)):
            _run(choices, grid, work, kept, losses, part=choices.random())
            replicas, stages = (
                choices.choice([1, 2, 3]),
                stages if choices.random() < 0.7 else choices.choice([1, 2, 4]),
            )
            old, grid = grid, _grid(replicas, stages, sections)
            offered: dict[int, dict[int, Spans]] = {section: {} for section in range(sections)}
            sources: dict[int, Worker] = {}
            survivors = choices.sample(old, max(1, len(old) - 1))
            for rank, source in zip(
                choices.sample(range(len(grid)), min(len(grid), len(survivors))), survivors, strict=False
            ):
                sources[rank] = source
                for section in grid[rank].sums.keys() & source.sums.keys():
                    offered[section][rank] = source.spans(section)
            known = spans_of({j for j in losses if choices.random() < 0.9})
            found = remainder(micro_batches, replicas, len(grid), offered, known)
            losses = set(numbers_of(known))
            if found is None:
                work, kept, losses = deal(((0, micro_batches),), replicas), [()] * sections, set()
                continue
            kept_at_all += found.kept
            work, kept = found.work, [found.kept_of(section) for section in range(sections)]
            for rank, sums in enumerate(found.taken):
                for each in sums:
                    assert isinstance(each, SectionSum)
                    assert each.micro_batches == sources[rank].spans(each.section)
                    grid[rank].sums[each.section] = list(sources[rank].sums[each.section])
        _run(choices, grid, work, kept, losses, part=1.0)
        for section in range(sections):
            added = [j for worker in grid for j in worker.sums.get(section, [])]
            assert sorted(added) == list(range(micro_batches))
        assert losses == set(range(micro_batches))
    assert kept_at_all > 200


def _grid(replicas: int, stages: int, sections: int) -> list[Worker]:
    share = sections // stages
    return [Worker(range(k * share, (k + 1) * share)) for _ in range(replicas) for k in range(stages)]


def _run(
    choices: random.Random,
    grid: list[Worker],
    work: tuple[Spans, ...],
    kept: list[Spans],
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
            sums += [j for j in through if not overlap(((j, j + 1),), kept[section])]
            if section == len(kept) - 1:
                losses.update(through)
    for section in range(len(kept)):
        holders = [worker for worker in grid if section in worker.sums]
        everything = sorted(j for worker in holders for j in worker.sums[section])
        if part < 1.0 and everything == list(range(kept_end(work, kept))) and choices.random() < 0.5:
            for worker in holders:  # some have heard of it, some not yet
                if choices.random() < 0.7:
                    worker.sums[section] = list(everything)


def kept_end(work: tuple[Spans, ...], kept: list[Spans]) -> int:
    """Number of micro-batches: the end of the last one that is kept or runs."""
    return max(end for spans in (*work, *kept) for _, end in spans)
