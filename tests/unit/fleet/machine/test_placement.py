import random
from collections import Counter
from itertools import pairwise

from tests.unit.fleet.support import candidates, make_job, make_plan, two_stages, unlike_pipelines
from varuna.core.devices import equal_workers
from varuna.core.messages import Transfer
from varuna.core.plan import Copies
from varuna.fleet.machine.copy_holders import copy_holders
from varuna.fleet.machine.placement import seat, transfers, uncovered

JOB = make_job(sections=4)
EVEN = (1, 1, 1, 1)
ALL = frozenset(range(4))
FRONT, BACK = frozenset({0, 1}), frozenset({2, 3})


def test_workers_without_state_sit_in_their_order() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    assert seat(plan, candidates(["a", "b", "c", "d", "e"]), EVEN) == ("a", "b", "c", "d", "e")


def test_everybody_keeps_the_stage_that_it_holds() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    holdings = {"a": BACK, "b": FRONT, "c": BACK, "d": FRONT}
    members = seat(plan, candidates(["a", "b", "c", "d"], holdings), EVEN)
    assert members == ("b", "a", "d", "c")
    assert transfers(plan, members, holdings, EVEN) == ()


def test_a_newcomer_becomes_the_spare_when_others_have_state() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    assert seat(plan, candidates(["new", "a", "b"], {"a": BACK, "b": FRONT}), EVEN) == ("b", "a", "new")


def test_the_larger_state_decides() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    holdings = {"a": frozenset({0, 2, 3}), "b": frozenset({1, 2})}
    assert seat(plan, candidates(["a", "b"], holdings), (9, 1, 1, 1)) == ("a", "b")
    assert seat(plan, candidates(["a", "b"], holdings), (1, 1, 9, 9)) == ("b", "a")


def test_copies_are_spread_over_the_holders() -> None:
    plan = make_plan(JOB, 4, None, stages=1)
    holdings = {"a": ALL, "b": ALL}
    moves = transfers(plan, ("a", "b", "c", "d"), holdings, EVEN)
    assert len(moves) == 8
    assert sum(move.source_rank == 0 for move in moves) == 4


def test_a_spare_serves_what_only_it_holds() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    holdings = {"a": FRONT, "b": FRONT, "s": BACK}
    assert transfers(plan, ("a", "b", "s"), holdings, EVEN) == (
        Transfer(section=2, source_rank=2, target_rank=1),
        Transfer(section=3, source_rank=2, target_rank=1),
    )


def test_sections_without_a_holder_are_named() -> None:
    assert uncovered(4, {"a": FRONT, "b": frozenset({3})}) == (2,)
    assert uncovered(1, {}) == (0,)


def test_neighbours_in_a_pipeline_share_a_node() -> None:
    plan = make_plan(JOB, 8, None, stages=4)
    nodes = {"a": "x", "b": "y", "c": "x", "d": "y", "e": "z", "f": "z", "g": "x", "h": "y", "s": "z"}
    members = seat(plan, candidates(list("abcdefghs"), nodes=nodes), EVEN)
    pipelines = ["".join(nodes[member] for member in members[first : first + 4]) for first in (0, 4)]
    crossings = sum(a != b for pipeline in pipelines for a, b in pairwise(pipeline))
    assert crossings == 2
    assert sorted(members) == sorted("abcdefghs")


def test_who_has_state_sits_beside_its_node_where_it_may_choose() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    nodes = {"a": "x", "b": "y", "c": "y", "d": "x"}
    holdings = {"a": FRONT, "b": FRONT, "c": BACK, "d": BACK}
    assert seat(plan, candidates(list("abcd"), holdings, nodes=nodes), EVEN) == ("a", "d", "b", "c")


def test_a_kept_plan_keeps_every_seat() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    holdings = {"a": FRONT, "c": FRONT, "d": BACK}
    assert seat(plan, candidates(["a", "c", "d", "new"], holdings), EVEN, kept=("a", "b", "c", "d")) == (
        "a",
        "new",
        "c",
        "d",
    )


def test_who_ran_a_stage_keeps_it_before_who_has_a_copy_of_it() -> None:
    """Both hold everything, and the stage that is larger now is seated first."""
    plan = make_plan(JOB, 2, None, stages=2)
    holdings = {"a": ALL, "b": ALL}
    for weights in ((1, 1, 9, 9), (9, 9, 1, 1), EVEN):
        for own in ({"a": FRONT, "b": BACK}, {"a": BACK, "b": FRONT}):
            members = seat(plan, candidates(["a", "b"], holdings, ran=own), weights)
            assert [own[name] for name in members] == [FRONT, BACK], (weights, own)


def test_a_copy_is_worth_more_than_having_run_less_of_a_stage() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    members = seat(plan, candidates(["a", "b"], {"a": ALL, "b": BACK}, ran={"a": BACK, "b": BACK}), EVEN)
    assert members == ("a", "b"), "nobody else has the front"


def test_state_that_is_shared_out_goes_to_who_will_hold_it_and_parameters_to_the_others() -> None:
    plan = make_plan(JOB, 3, None, stages=1)
    holders = ((0, 1), (1, 2), (2, 0), (0, 1, 2))
    holdings = {"a": frozenset({0, 2, 3}), "b": frozenset({0, 1, 3})}
    lent = {"a": frozenset({1}), "b": frozenset({2})}
    assert transfers(plan, ("a", "b", "new"), holdings, EVEN, lent=lent, holders=holders) == (
        Transfer(section=0, source_rank=0, target_rank=2, lent=True),
        Transfer(section=1, source_rank=1, target_rank=2),
        Transfer(section=2, source_rank=0, target_rank=2),
        Transfer(section=3, source_rank=1, target_rank=2),
    )


def test_optimizer_state_follows_of_sections_that_are_to_be_whole() -> None:
    plan = make_plan(JOB, 2, None, stages=1)
    holders = ((0,), (0, 1), (0, 1), (0, 1))
    moves = transfers(plan, ("a", "new"), {"a": FRONT | BACK}, EVEN, holders=holders, following={0, 1, 2})
    assert [(move.section, move.lent, move.follows) for move in moves] == [
        (0, True, False), (1, False, True), (2, False, True), (3, False, False),
    ]  # fmt: skip


def test_parameters_that_are_behind_come_from_whoever_has_them_whole() -> None:
    plan = make_plan(JOB, 2, None, stages=1)
    holdings = {"a": FRONT, "b": BACK}
    holders = ((0,), (0,), (1,), (1,))
    moves = transfers(plan, ("a", "b"), holdings, EVEN, holders=holders)
    assert {(move.section, move.target_rank, move.lent) for move in moves} == {
        (0, 1, True), (1, 1, True), (2, 0, True), (3, 0, True),
    }  # fmt: skip


def test_a_worker_sits_where_its_share_of_the_state_is_wanted() -> None:
    plan = make_plan(JOB, 3, None, stages=1)
    holders = ((0, 1), (1, 2), (2, 0), (2, 0))
    holdings = {"a": frozenset({1, 2, 3}), "b": frozenset({0, 2, 3}), "c": FRONT}
    lent = {"a": frozenset({0}), "b": frozenset({1}), "c": BACK}
    assert seat(plan, candidates(["a", "b", "c"], holdings, lent=lent), EVEN, holders=holders) == ("b", "c", "a")


def test_a_copy_of_state_is_kept_on_another_machine_where_there_is_one() -> None:
    plan = make_plan(JOB, 4, None).model_copy(update={"copies": Copies.STATE})
    assert copy_holders(plan, list("aaaa")) == (2, 3, 0, 1)
    assert copy_holders(plan, list("abcd")) == (2, 3, 0, 1)
    assert copy_holders(plan, list("abab")) == (1, 2, 3, 0), "who would be a pair share a machine"
    assert copy_holders(plan, list("aabb")) == (2, 3, 0, 1), "neighbours share a machine"
    assert copy_holders(plan, list("aaab")) == (3, 0, 1, 2), "one machine has most of them"
    assert copy_holders(make_plan(JOB, 4, None), list("abcd")) == ()
    assert copy_holders(make_plan(JOB, 1, None).model_copy(update={"copies": Copies.STATE}), ["a"]) == ()


def test_few_pairs_of_workers_take_a_state_along() -> None:
    """In a ring of n there are n pairs of an owner and its keeper."""
    for workers in range(2, 12):
        plan = make_plan(make_job(sections=workers), workers, None).model_copy(update={"copies": Copies.STATE})
        found = copy_holders(plan, [f"n{rank}" for rank in range(workers)])
        assert sorted(keeper for keeper in found if keeper is not None) == list(range(workers))
        assert all(keeper != rank for rank, keeper in enumerate(found))
        fatal = {frozenset((rank, keeper)) for rank, keeper in enumerate(found)}
        assert len(fatal) == (workers + workers % 2 * 3) // 2


def test_copies_of_sums_are_kept_by_who_runs_the_same_sections_on_another_machine() -> None:
    plan = make_plan(JOB, 6, None, stages=2).model_copy(update={"copies": Copies.SUMS})
    assert copy_holders(plan, list("abcdef")) == (2, 3, 4, 5, 0, 1)
    assert copy_holders(plan, list("aaaaaa")) == (2, 3, 4, 5, 0, 1), "one machine is all that there is"
    assert copy_holders(plan, list("aabbcc")) == (2, 3, 4, 5, 0, 1)
    assert copy_holders(plan, list("aabbab")) == (2, 3, 0, 1, 5, 4), "not all replicas are on others"
    assert copy_holders(plan, list("aaaaab")) == (5, None, None, None, None, 4), (
        "a machine takes all its workers with it"
    )


def test_nobody_keeps_sums_on_the_owners_machine_or_of_two_owners() -> None:
    choices = random.Random(0)
    for _ in range(300):
        workers = choices.randrange(2, 13)
        made = choices.choice([two_stages, unlike_pipelines])(JOB, equal_workers(workers), None)
        plan = made.model_copy(update={"copies": Copies.SUMS})
        nodes = [choices.choice("abcd"[: choices.randint(1, 4)]) for _ in range(plan.workers)]
        found = copy_holders(plan, nodes)
        if plan.workers == 1:
            continue
        named = [keeper for keeper in found if keeper is not None]
        assert len(set(named)) == len(named)
        most = max(Counter(nodes).values())
        if most == plan.workers:
            assert len(named) == plan.workers
        else:
            assert all(keeper is None or nodes[rank] != nodes[keeper] for rank, keeper in enumerate(found))
            assert len(named) == min(plan.workers, 2 * (plan.workers - most))
