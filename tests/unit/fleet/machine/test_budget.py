"""A run with a budget ends early enough for its last checkpoint and its model."""

import pytest

from varuna.fleet.machine.budget import Decision, Left, Seen, Used, decide, lead_s, left_of, reason_to_end
from varuna.fleet.state.run_events import Budgeted

HOUR_S = 3600.0
HOURS = Budgeted(max_hours=10.0)
MONEY = Budgeted(max_dollars=20.0)


def decision(
    left: Left, seen: Seen, *, is_ending: bool = False, is_saved: bool = True, tried_saving: bool = True
) -> Decision:
    return decide(left, seen, is_ending=is_ending, is_saved=is_saved, tried_saving=tried_saving)


def test_hours_are_left_whatever_workers_cost() -> None:
    left = left_of(HOURS, Used(wall_s=9 * HOUR_S, dollars=500.0, dollars_per_hour=50.0))
    assert (left.until_s, left.flag) == (HOUR_S, "--max-hours")


def test_money_lasts_as_long_as_the_workers_that_are_here_let_it() -> None:
    few = left_of(MONEY, Used(wall_s=0.0, dollars=15.0, dollars_per_hour=1.0))
    many = left_of(MONEY, Used(wall_s=0.0, dollars=15.0, dollars_per_hour=10.0))
    assert (few.until_s, many.until_s) == (5 * HOUR_S, HOUR_S / 2)


def test_money_lasts_for_ever_while_nobody_is_paid_unless_it_is_gone() -> None:
    assert left_of(MONEY, Used(wall_s=0.0, dollars=19.0)).until_s == float("inf")
    assert left_of(MONEY, Used(wall_s=0.0, dollars=20.0)).until_s == 0.0


@pytest.mark.parametrize(("dollars", "flag"), [(1.0, "--max-hours"), (19.0, "--max-cost")])
def test_of_two_limits_that_counts_which_is_reached_first(dollars: float, flag: str) -> None:
    both = Budgeted(max_hours=10.0, max_dollars=20.0)
    assert left_of(both, Used(wall_s=5 * HOUR_S, dollars=dollars, dollars_per_hour=1.0)).flag == flag


def test_a_run_ends_before_its_limit_by_two_steps_two_saves_and_a_margin() -> None:
    left, seen = left_of(HOURS, Used(wall_s=0.0)), Seen(step_s=60.0, saving_s=100.0)
    ahead_s = lead_s(left, seen)
    assert ahead_s > 2 * 60 + 2 * 100 + 30
    assert decision(left._replace(until_s=ahead_s + 1), seen) is Decision.GO_ON
    assert decision(left._replace(until_s=ahead_s), seen) is Decision.FINISH


@pytest.mark.parametrize("slower", [Seen(90.0, 100.0), Seen(60.0, 200.0)])
def test_slow_steps_and_slow_stores_end_it_sooner(slower: Seen) -> None:
    left = left_of(HOURS, Used(wall_s=0.0))
    assert lead_s(left, slower) > lead_s(left, Seen(60.0, 100.0))


def test_what_is_kept_for_a_save_that_nobody_has_seen_is_no_more_than_half_of_a_short_budget() -> None:
    minute = left_of(Budgeted(max_hours=1 / 60), Used(wall_s=0.0))
    assert lead_s(minute, Seen(0.0, None)) < 30
    assert lead_s(left_of(HOURS, Used(wall_s=0.0)), Seen(0.0, None)) > 120


def test_a_checkpoint_is_asked_for_once_so_that_it_is_known_what_one_takes() -> None:
    unknown = Seen(1.0, None)
    early, later = (left_of(HOURS, Used(wall_s=hours * HOUR_S)) for hours in (2.0, 3.0))
    assert decision(early, unknown, tried_saving=False) is Decision.GO_ON
    assert decision(later, unknown, tried_saving=False) is Decision.SAVE
    assert decision(later, unknown, tried_saving=True) is Decision.GO_ON
    assert decision(later, Seen(1.0, 5.0), tried_saving=False) is Decision.GO_ON


def test_a_run_that_ends_is_told_so_once_and_cut_off_at_the_limit_if_all_is_saved() -> None:
    left, seen = left_of(HOURS, Used(wall_s=0.0)), Seen(1.0, 10.0)
    assert decision(left._replace(until_s=1.0), seen, is_ending=True) is Decision.GO_ON
    assert decision(left._replace(until_s=0.0), seen, is_ending=True) is Decision.CUT


def test_a_save_that_is_late_may_take_as_long_again_and_no_longer() -> None:
    left, seen = left_of(HOURS, Used(wall_s=0.0)), Seen(1.0, 10.0)
    late_s = lead_s(left, seen)
    assert decision(left._replace(until_s=1 - late_s), seen, is_ending=True, is_saved=False) is Decision.GO_ON
    assert decision(left._replace(until_s=-late_s), seen, is_ending=True, is_saved=False) is Decision.CUT


def test_the_reason_says_how_to_go_on() -> None:
    both = Budgeted(max_hours=1.5, max_dollars=20.0)
    hours, money = (Left(0.0, flag, 1.0) for flag in ("--max-hours", "--max-cost"))
    assert "1.5 hours (--max-hours)" in reason_to_end(both, hours)
    assert reason_to_end(both, hours).endswith("a larger --max-hours")
    assert "$20.00 (--max-cost)" in reason_to_end(both, money)
