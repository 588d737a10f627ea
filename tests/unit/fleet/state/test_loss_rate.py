"""The estimate of how often workers are lost: what it begins with, forgets, and when plans are made for another one."""

from dataclasses import replace

import pytest

from varuna.fleet.state.loss_rate import NOTICED, SPOT_PER_HOUR, LossRate

HOUR = 3600.0


def after(count: int, every_s: float, *, noticed: bool = False) -> LossRate:
    rate = LossRate(began_s=0.0)
    for number in range(count):
        rate = rate.lost((number + 1) * every_s, burst_s=1.0, noticed=noticed)
    return rate


def test_a_run_without_losses_plans_as_if_there_were_none() -> None:
    rate = LossRate(began_s=0.0)
    assert rate.per_hour(0.0) == 0.0
    assert rate.to_plan_for(5 * HOUR) == 0.0


def test_the_estimate_approaches_the_rate_and_forgets_an_old_one() -> None:
    rate = after(60, 600.0)
    assert rate.per_hour(10 * HOUR) == pytest.approx(6.0, rel=0.1)
    assert rate.per_hour(40 * HOUR) < 0.1


def test_the_first_loss_is_not_taken_for_the_rule() -> None:
    assert 0.5 < after(1, 60.0).per_hour(60.0) < 2.5


def test_workers_that_go_together_are_one_loss_and_a_notice_makes_it_small() -> None:
    rate = LossRate(began_s=0.0)
    for moment in (100.0, 100.0, 100.6):
        rate = rate.lost(moment, burst_s=1.0, noticed=False)
    assert rate.per_hour(200.0) == after(1, 100.0).per_hour(200.0)
    assert after(9, 600.0, noticed=True).per_hour(HOUR) == pytest.approx(NOTICED * after(9, 600.0).per_hour(HOUR))


def test_a_wobble_is_no_reason_to_plan_anew() -> None:
    rate = after(60, 600.0)
    for planned in (4.0, 9.0):
        assert replace(rate, planned_per_hour=planned).to_plan_for(10 * HOUR) == planned
    small = replace(rate, planned_per_hour=2.0)
    assert small.to_plan_for(10 * HOUR) == pytest.approx(rate.per_hour(10 * HOUR), rel=0.05)


def test_spot_machines_are_expected_to_be_lost_until_a_run_has_seen_for_itself() -> None:
    rate = LossRate(began_s=0.0).on_spot_machines(10.0)
    assert (rate.planned_per_hour, rate.to_plan_for(10.0)) == (SPOT_PER_HOUR, SPOT_PER_HOUR)
    assert rate.on_spot_machines(20.0) is rate
    assert rate.per_hour(10 * HOUR) < 0.3, "nothing was lost"
    seen = after(1, 60.0)
    assert seen.on_spot_machines(70.0) is seen


def test_a_manager_that_starts_again_plans_for_what_the_last_one_did() -> None:
    again = LossRate(began_s=0.0, prior_per_hour=6.0, planned_per_hour=6.0)
    assert again.to_plan_for(0.0) == 6.0
    assert again.to_plan_for(600.0) == 6.0
    assert again.to_plan_for(40 * HOUR) < 1.0, "nothing was lost since"
