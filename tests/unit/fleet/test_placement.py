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
