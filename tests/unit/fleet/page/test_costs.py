"""The costs of a run follow from its journal alone."""

import pytest

from tests.unit.observe.recorded_events import plan
from varuna.fleet.machine.budget import Used
from varuna.fleet.page.costs import Bill, Meter, shown, shown_budget, spent
from varuna.fleet.run_folder.past_events import PastStep
from varuna.fleet.state.account import Account
from varuna.fleet.state.run_events import (
    Budgeted,
    GenerationRecord,
    GenerationStarted,
    Priced,
    RunEnded,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)

HOUR_S = 3600.0


def joined(worker: str) -> WorkerJoined:
    return WorkerJoined(worker=worker, pid=1)


def lost(worker: str) -> WorkerLost:
    return WorkerLost(worker=worker, rank=0, cause="killed")


def begun(generation: int, first_step: int, shape: tuple[int, int]) -> GenerationStarted:
    record = GenerationRecord(
        generation=generation, plan=plan(*shape), members=("w0",), cause="start", first_step=first_step
    )
    return GenerationStarted(record=record)


def step(number: int, seconds: float) -> PastStep:
    """A step of 16 examples that took so long."""
    return PastStep(number, 0.0, 1.0, 16 / seconds)


def bill(meter: Meter, now_s: float) -> Bill:
    found = meter.cost(now_s)
    assert found is not None
    return found


def test_each_worker_is_paid_from_joining_to_leaving() -> None:
    meter = Meter()
    meter.add_event(Priced(per_hour=2.0), 0.0)
    assert bill(meter, HOUR_S).spent == 0.0
    for name, at_s in (("w0", HOUR_S), ("w1", HOUR_S), ("w1", 1.5 * HOUR_S)):  # a manager that returns hears it again
        meter.add_event(joined(name), at_s)
    meter.add_event(lost("w1"), 2 * HOUR_S)
    meter.add_event(lost("w1"), 2.5 * HOUR_S)
    assert bill(meter, 3 * HOUR_S) == Bill(spent=6.0, per_hour=2.0, on_demand=None, worker_hours=3.0)
    meter.add_event(WorkerLeft(worker="w0"), 4 * HOUR_S)
    assert bill(meter, 9 * HOUR_S) == Bill(spent=8.0, per_hour=0.0, on_demand=None, worker_hours=4.0)


def test_a_run_that_is_over_costs_nothing_more() -> None:
    meter = Meter()
    meter.add_event(Priced(per_hour=1.0), 0.0)
    meter.add_event(joined("w0"), 0.0)
    meter.add_event(RunEnded(exit_code=0, text=""), HOUR_S)
    assert bill(meter, 100 * HOUR_S).spent == 1.0


def test_a_price_holds_from_when_it_is_said_and_the_first_one_for_what_was_before() -> None:
    meter = Meter()
    meter.add_event(joined("w0"), 0.0)
    assert meter.cost(HOUR_S) is None
    meter.add_event(Priced(per_hour=1.0), HOUR_S)
    meter.add_event(Priced(per_hour=3.0), 2 * HOUR_S)
    assert bill(meter, 3 * HOUR_S).spent == pytest.approx(1 + 1 + 3)


def test_on_demand_only_the_steps_that_count_are_paid() -> None:
    meter = Meter()
    meter.add_event(Priced(per_hour=1.0, on_demand_per_hour=36.0), 0.0)
    meter.add_event(begun(0, 0, (2, 2)), 0.0)
    for number in range(10):
        meter.take_step(step(number, 2.0))
    assert bill(meter, 0.0).on_demand == pytest.approx(4 * 20 * 0.01)
    meter.add_event(begun(1, 6, (1, 1)), 0.0)  # a rollback: steps 6 to 9 do not count any more
    assert bill(meter, 0.0).on_demand == pytest.approx(4 * 20 * 0.01)
    meter.take_step(step(6, 5.0))
    assert bill(meter, 0.0).on_demand == pytest.approx((4 * 12 + 5) * 0.01)
    meter.take_step(step(6, 5.0))
    assert bill(meter, 0.0).on_demand == pytest.approx((4 * 12 + 5) * 0.01)


def test_a_rollback_beyond_several_generations_leaves_what_came_before_them() -> None:
    meter = Meter()
    meter.add_event(Priced(per_hour=1.0, on_demand_per_hour=36.0), 0.0)
    for generation, first in enumerate((0, 5, 8)):
        meter.add_event(begun(generation, first, (1, 1)), 0.0)
        for number in range(first, first + 3):
            meter.take_step(step(number, 1.0))
    meter.add_event(begun(3, 2, (1, 1)), 0.0)
    meter.add_event(begun(4, 2, (1, 1)), 0.0)  # the one before broke before its first step
    meter.take_step(step(2, 1.0))
    assert bill(meter, 0.0).on_demand == pytest.approx(3 * 0.01)
    meter.add_event(begun(5, 0, (1, 1)), 0.0)
    meter.take_step(step(0, 7.0))
    assert bill(meter, 0.0).on_demand == pytest.approx(7 * 0.01)


def test_a_clock_that_was_set_back_takes_no_money_back() -> None:
    meter = Meter()
    meter.add_event(Priced(per_hour=1.0), 0.0)
    meter.add_event(joined("w0"), HOUR_S)
    meter.add_event(joined("w1"), 2 * HOUR_S)
    before = bill(meter, 2 * HOUR_S).spent
    assert bill(meter, 0.0).spent == before == 1.0


def test_money_is_told_with_what_was_saved_or_was_not() -> None:
    assert spent(None) == ""
    assert spent(Bill(1.234, 1.0, None, 1.0)) == "$1.23 spent"
    assert spent(Bill(1.0, 1.0, 4.0, 1.0)) == "$1.00 spent, $4.00 on demand (75 % saved)"
    assert spent(Bill(0.05, 1.0, 0.04, 1.0)) == "$0.0500 spent, $0.0400 on demand (25 % more)"
    told = shown(Bill(1.0, 1.0, 4.0, 1.0))
    assert told is not None
    assert (told["spent"], told["saved"]) == (1.0, 0.75)


def started_again(*, price: float | None) -> Meter:
    """A run whose first start had one worker for an hour, and which went on a day later with two."""
    first = Meter()
    if price is not None:
        first.add_event(Priced(per_hour=price), 0.0)
    first.add_event(joined("w0"), 0.0)
    first.add_event(RunEnded(exit_code=0, text=""), HOUR_S)
    later_s = 25 * HOUR_S
    again = Meter(first.account(2 * HOUR_S))
    for event in (Priced(per_hour=2.0), joined("w0"), joined("w1")):
        again.add_event(event, later_s)
    return again


@pytest.mark.parametrize(("price", "before"), [(1.0, 1.0), (None, 2.0)])
def test_a_run_that_starts_again_goes_on_from_what_it_has_used_up(price: float | None, before: float) -> None:
    again = started_again(price=price)
    assert bill(again, 26 * HOUR_S) == Bill(spent=before + 4.0, per_hour=4.0, on_demand=None, worker_hours=3.0)
    assert again.used(26 * HOUR_S) == Used(wall_s=2 * HOUR_S, dollars=before + 4.0, dollars_per_hour=4.0)
    assert Meter(again.account(26 * HOUR_S)).account(99 * HOUR_S) == again.account(26 * HOUR_S)


def test_hours_without_a_price_can_be_weighed_before_one_is_said() -> None:
    meter = Meter(Account(worker_s=HOUR_S, unpriced_s=HOUR_S, wall_s=HOUR_S))
    assert meter.used(0.0).dollars == 0.0
    assert meter.used(0.0, Priced(per_hour=3.0)).dollars == 3.0


def test_steps_of_an_earlier_start_that_run_again_count_once_on_demand() -> None:
    first = Meter()
    first.add_event(Priced(per_hour=1.0, on_demand_per_hour=36.0), 0.0)
    first.add_event(begun(0, 0, (1, 1)), 0.0)
    for number in range(10):
        first.take_step(step(number, 1.0))
    again = Meter(first.account(0.0))
    again.add_event(Priced(per_hour=1.0, on_demand_per_hour=36.0), 0.0)
    again.add_event(begun(0, 8, (1, 1)), 0.0)  # from the checkpoint of step 8
    again.take_step(step(8, 5.0))
    assert bill(again, 0.0).on_demand == pytest.approx((8 + 5) * 0.01)


def test_what_is_left_of_a_budget_is_told_with_its_end_at_this_rate() -> None:
    used = Used(wall_s=HOUR_S, dollars=15.0, dollars_per_hour=10.0)
    told = shown_budget(Budgeted(max_dollars=20.0, max_hours=10.0), used, is_over=False)
    assert told is not None
    assert told["phrases"] == [
        "$5.00 of $20.00 left",
        "9h 00m of 10h 00m left",
        "--max-cost ends it in 30m 00s at this rate",
    ]
    over = shown_budget(Budgeted(max_hours=10.0), used, is_over=True)
    assert over is not None
    assert (over["phrases"], over["ends_in_s"]) == (["9h 00m of 10h 00m left"], None)
    assert shown_budget(None, used, is_over=False) is None
