from itertools import pairwise

from tests.unit.fleet.support import make_job, make_plan
from varuna.core.messages import Transfer
from varuna.fleet.placement import seat, transfers, uncovered

JOB = make_job(sections=4)
EVEN = (1, 1, 1, 1)
ALL = frozenset(range(4))
FRONT, BACK = frozenset({0, 1}), frozenset({2, 3})


def test_workers_without_state_sit_in_their_order() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    assert seat(plan, ["a", "b", "c", "d", "e"], {}, EVEN) == ("a", "b", "c", "d", "e")


def test_everybody_keeps_the_stage_that_it_holds() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    holdings = {"a": BACK, "b": FRONT, "c": BACK, "d": FRONT}
    members = seat(plan, ["a", "b", "c", "d"], holdings, EVEN)
    assert members == ("b", "a", "d", "c")
    assert transfers(plan, members, holdings, EVEN) == ()


def test_a_newcomer_becomes_the_spare_when_others_have_state() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    assert seat(plan, ["new", "a", "b"], {"a": BACK, "b": FRONT}, EVEN) == ("b", "a", "new")


def test_the_larger_state_decides() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    holdings = {"a": frozenset({0, 2, 3}), "b": frozenset({1, 2})}
    assert seat(plan, ["a", "b"], holdings, (9, 1, 1, 1)) == ("a", "b")
    assert seat(plan, ["a", "b"], holdings, (1, 1, 9, 9)) == ("b", "a")


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
    members = seat(plan, list("abcdefghs"), {}, EVEN, nodes=nodes)
    pipelines = ["".join(nodes[member] for member in members[first : first + 4]) for first in (0, 4)]
    crossings = sum(a != b for pipeline in pipelines for a, b in pairwise(pipeline))
    assert crossings == 2
    assert sorted(members) == sorted("abcdefghs")


def test_who_has_state_sits_beside_its_node_where_it_may_choose() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    nodes = {"a": "x", "b": "y", "c": "y", "d": "x"}
    holdings = {"a": FRONT, "b": FRONT, "c": BACK, "d": BACK}
    assert seat(plan, list("abcd"), holdings, EVEN, nodes=nodes) == ("a", "d", "b", "c")


def test_a_kept_plan_keeps_every_seat() -> None:
    plan = make_plan(JOB, 4, None, stages=2)
    holdings = {"a": FRONT, "c": FRONT, "d": BACK}
    assert seat(plan, ["a", "c", "d", "new"], holdings, EVEN, kept=("a", "b", "c", "d")) == ("a", "new", "c", "d")
