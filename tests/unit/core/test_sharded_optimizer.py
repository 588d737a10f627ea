"""Optimizer state shared out among replicas: everything held twice, evenly, and by the same rule everywhere."""

import random
from itertools import combinations

import pytest

from tests.unit.fleet.support import make_job, make_plan
from varuna.core.sharded_optimizer import assign_holders, held_by, holders_of


def fullest(state_bytes: list[int], replicas: int) -> int:
    holders = assign_holders(state_bytes, replicas)
    return max(sum(state_bytes[s] for s in held_by(holders, range(len(holders)), r)) for r in range(replicas))


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_or_two_replicas_hold_everything(replicas: int) -> None:
    assert assign_holders([5, 0, 7], replicas) == (tuple(range(replicas)),) * 3


@pytest.mark.parametrize("replicas", range(3, 12))
def test_every_section_has_an_owner_and_a_mirror_half_way_round(replicas: int) -> None:
    for owner, mirror in assign_holders([3] * 24, replicas):
        assert mirror == (owner + replicas // 2) % replicas


@pytest.mark.parametrize("replicas", range(3, 12))
def test_a_vm_with_at_most_half_of_the_replicas_never_holds_both_copies(replicas: int) -> None:
    generator = random.Random(replicas)
    state_bytes = [generator.randint(1, 9) for _ in range(40)]
    for first in range(replicas - replicas // 2 + 1):
        vm = set(range(first, first + replicas // 2))
        assert all(not set(holders) <= vm for holders in assign_holders(state_bytes, replicas))


@pytest.mark.parametrize(
    ("replicas", "sections", "expected"), [(3, 3, 2), (3, 12, 8), (4, 12, 6), (8, 16, 4), (8, 2, 1)]
)
def test_equal_sections_are_spread_evenly(replicas: int, sections: int, expected: int) -> None:
    assert fullest([1] * sections, replicas) == expected


def test_no_replica_holds_much_more_than_its_share() -> None:
    for seed in range(50):
        generator = random.Random(seed)
        replicas, state_bytes = generator.randint(3, 9), [generator.randint(1, 100) for _ in range(30)]
        assert fullest(state_bytes, replicas) <= 2 * sum(state_bytes) / replicas + max(state_bytes)


def test_with_an_even_number_of_replicas_few_pairs_matter() -> None:
    holders = assign_holders([1] * 60, 6)
    fatal = [pair for pair in combinations(range(6), 2) if any(set(each) <= set(pair) for each in holders)]
    assert fatal == [(0, 3), (1, 4), (2, 5)]


def test_sections_without_state_are_everybodys() -> None:
    assert assign_holders([0, 4, 0], 4) == ((0, 1, 2, 3), (0, 2), (0, 1, 2, 3))


def test_stages_are_shared_out_each_by_itself() -> None:
    job = make_job(sections=6)
    plan = make_plan(job, 6, None, stages=2)
    holders = holders_of(plan, job.model.sections, shared=True)
    assert holders == assign_holders([200] * 3, 3) * 2
    assert held_by(holders, plan.first.sections_of(1), 0) == (3, 5)
    assert holders_of(plan, job.model.sections, shared=False) == ((0, 1, 2),) * 6
