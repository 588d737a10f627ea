"""Spares, kept plans, and gains that pay or do not."""

from dataclasses import replace

import pytest

from tests.unit.fleet.support import Driver, make_job, make_plan, sends, two_stages
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.messages import Hold, RaiseFlag, Suspect, Voted
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import SpawnRequested
from varuna.fleet.state.morph_gain import MorphEstimate, MorphHistory, estimate_morph
from varuna.fleet.state.run_events import Notice


class Counting:
    """A planner that knows how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        self.asked.append(size_of(workers))
        return two_stages(job, workers, micro_batch)


def test_a_spare_takes_over_without_a_new_plan_and_everybody_else_keeps_its_seat() -> None:
    planner = Counting()
    driver = Driver(FleetConfig(workers=7, replace=False), plan=planner)
    driver.begin(0)
    assert planner.asked == [7]
    driver.kill("w2")
    driver.all_held(1)
    assert planner.asked == [7]
    assert driver.fleet.record.members == ("w0", "w1", "w6", "w3", "w4", "w5")
    assert driver.fleet.record.moved_sections == 2


def test_the_first_loss_without_a_spare_makes_a_new_plan() -> None:
    planner = Counting()
    driver = Driver(FleetConfig(workers=6, replace=False), plan=planner)
    driver.begin(0)
    driver.kill("w2")
    driver.all_held(1)
    assert planner.asked == [6, 5]
    assert driver.fleet.record.plan.workers == 4


def test_a_planned_morph_does_not_wait_for_spares_that_heard_no_vote() -> None:
    driver = Driver(FleetConfig(workers=5, replace=False), plan=two_stages)
    driver.begin(0)
    driver.feed(SpawnRequested(1))
    driver.hello("w5")
    assert len(sends(driver.wait(1.2), RaiseFlag)) == 1
    assert driver.fleet.record.members[4:] == ("w4",)
    driver.voted(1)
    first, *others = driver.fleet.record.grid
    assert sends(driver.held(first, 2), Hold) == [("w4", Hold(generation=0))]  # the ranks stop after the vote
    for name in (*others, "w4"):
        assert not sends(driver.held(name, 2 if name != "w4" else None), Hold)
    assert driver.fleet.generation == 1
    assert driver.fleet.record.plan.workers == 6
    assert driver.fleet.record.steps_redone == 0


def test_a_rank_that_missed_the_regroup_vote_is_told_at_once() -> None:
    """Ranks that have the result leave, and their links break for one that has not: it waits for a word."""
    for order in ("before", "after"):
        driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
        driver.begin(0)
        driver.feed(SpawnRequested(2))
        driver.hello("w4")
        driver.hello("w5")
        driver.wait(1.2)
        first, late, *others = driver.fleet.record.grid
        driver.voted(1)
        told = [] if order == "after" else sends(driver.say(late, Suspect(generation=0, reason="the link broke")), Hold)
        told += sends(driver.held(first, 2), Hold)
        told += (
            [] if order == "before" else sends(driver.say(late, Suspect(generation=0, reason="the link broke")), Hold)
        )
        assert told == [(late, Hold(generation=0))]
        for name in others:
            driver.held(name, 2)
        driver.held(late, 1)
        driver.held(late, 2)  # with the verdict: COMMIT
        assert driver.fleet.generation == 1
        assert driver.fleet.record.steps_redone == 0


def gaining(wall_s: float, steps: int = 100_000) -> Driver:
    driver = Driver(FleetConfig(workers=4), plan=two_stages, job=make_job(steps=steps))
    driver.begin(0, 1)
    driver.fleet = replace(driver.fleet, recorded=replace(driver.fleet.recorded, wall_s=wall_s))
    driver.feed(SpawnRequested(2))
    driver.hello("w4")
    driver.hello("w5")
    return driver


def test_a_gain_that_saves_more_than_it_stalls_is_taken() -> None:
    driver = gaining(wall_s=1.0)
    assert len(sends(driver.wait(1.2), RaiseFlag)) == 1
    assert "will be admitted: steps 33 % faster save 41.8 s" in driver.told(Notice)[-1].text


def test_a_gain_is_left_where_the_next_change_comes_too_soon() -> None:
    driver = gaining(wall_s=1.0)
    driver.fleet = replace(
        driver.fleet, experience=MorphHistory(began_s=0.0, changes=200, changed_s=0.0, stalls_s=(5.0, 7.0))
    )
    assert not sends(driver.wait(2), RaiseFlag)
    assert "not more than the 6.0 s that a morph takes" in driver.told(Notice)[-1].text
    seen = len(driver.told(Notice))
    driver.wait(120)
    assert len(driver.told(Notice)) == seen  # looked at again, but nothing new to say


def test_a_gain_is_left_when_the_run_is_nearly_done() -> None:
    driver = gaining(wall_s=0.01, steps=10)
    assert not sends(driver.wait(2), RaiseFlag)


def test_spares_are_looked_at_again() -> None:
    driver = gaining(wall_s=1.0)
    driver.fleet = replace(driver.fleet, experience=MorphHistory(began_s=0.0, stalls_s=(1000.0,)))
    assert not sends(driver.wait(2), RaiseFlag)
    driver.fleet = replace(driver.fleet, experience=MorphHistory(began_s=0.0, stalls_s=(1.0,)))
    assert not sends(driver.wait(30), RaiseFlag)
    assert len(sends(driver.wait(40), RaiseFlag)) == 1


def test_what_the_first_step_waits_for_is_a_stall_as_well() -> None:
    """Its vote took 9.5 s of 10: the next one shows that a step takes 2."""
    driver = gaining(wall_s=1.0)
    driver.wait(1.2)
    driver.voted(driver.fleet.recorded.step + 1)
    driver.all_held(driver.fleet.recorded.step + 1)
    driver.wait(10, still=False)
    for wall_s, stall_s in ((9.5, 0.5), (2.0, 8.0), (3.0, 8.0)):
        vote = driver.vote(driver.fleet.recorded.step + 1).model_copy(update={"wall_s": wall_s})
        driver.say(driver.fleet.members[0], Voted(vote=vote))
        assert driver.fleet.experience.stalls_s == pytest.approx((stall_s,), abs=0.3)


def test_a_run_learns_how_often_things_change_and_what_a_morph_costs() -> None:
    experience = MorphHistory(began_s=0.0)
    assert experience.gap_s(0.0) == 250
    for now_s in (100.0, 100.5, 200.0, 300.0):  # the first two are one change
        experience = experience.changed(now_s, 1.0)
    assert experience.changes == 3
    assert experience.gap_s(350.0) == 150
    job = make_job()
    plan = make_plan(job, 4, None)
    assert experience.stall_s(job, plan) > 1.0
    assert experience.stalled(3.0).stalled(5.0).stall_s(job, plan) == 4.0


def test_a_second_holder_of_each_section_is_worth_what_a_rollback_would_cost() -> None:
    job = make_job()
    alone, double = make_plan(job, 2, None, stages=2), make_plan(job, 4, None, stages=2)
    weighing = estimate_morph(alone, double, computing_s=1, stall_s=10, exposed_s=60)
    assert weighing.pays
    assert "a second holder of each section 30.0 s" in str(weighing)
    assert not estimate_morph(double, make_plan(job, 6, None, stages=2), computing_s=1, stall_s=10, exposed_s=60).pays


def test_what_is_weighed_is_told_as_it_is() -> None:
    def told(faster: float, spared_s: float) -> str:
        return str(MorphEstimate(saved_s=60 * faster, stall_s=1.0, faster=faster, spared_s=spared_s))

    expected = "before the next change is expected"
    assert told(0.5, 0.0) == f"steps 50 % faster save 30.0 s {expected}, more than the 1.0 s that a morph takes"
    assert told(0.003, 0.0).startswith(f"steps less than 1 % faster save 0.2 s {expected}, not more than")
    second = "a second holder of each section"
    assert f"save 30.0 s {expected}, and {second} 9.0 s, more than" in told(0.5, 9.0)
    slower = "the 1.2 s that steps 2 % slower cost"
    assert (
        told(-0.02, 9.0) == f"{second} is worth 9.0 s, more than the 1.0 s that a morph takes and {slower} {expected}"
    )
    assert told(-0.02, 2.0).startswith(f"{second} is worth 2.0 s, not more than")
    assert (
        told(0.0, 9.0) == f"{second} is worth 9.0 s, more than the 1.0 s that a morph takes; steps take as long as now"
    )


def test_a_spare_that_stays_one_is_not_told_to_have_joined_again() -> None:
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
    driver.begin(0)
    driver.kill("w3")
    driver.all_held(1)
    driver.voted(1)
    spare = next(name for name in ("w0", "w1", "w2") if not driver.fleet.record.has_seat(name))
    driver.wait(3.0)
    assert not [notice.text for notice in driver.told(Notice) if f"{spare} joined" in notice.text]


def test_a_slower_plan_never_pays() -> None:
    job = make_job()
    weighing = estimate_morph(
        make_plan(job, 4, None), make_plan(job, 2, None), computing_s=100, stall_s=0, exposed_s=100
    )
    assert not weighing.pays
    assert "would not be faster" in str(weighing)


def test_a_second_holder_is_taken_in_though_no_step_gets_faster() -> None:
    def no_faster(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return make_plan(job, workers, micro_batch, stages=1).model_copy(update={"step_s": 1.0})

    driver = Driver(FleetConfig(workers=1, replace=False), plan=no_faster)
    driver.begin(0)
    driver.wait(60.0)  # there is something to lose
    driver.feed(SpawnRequested(1))
    driver.hello("w1")
    assert len(sends(driver.wait(1.2), RaiseFlag)) == 1
    driver.voted(1)
    driver.held("w0", 2)
    assert driver.fleet.record.plan.replicas == 2  # and not the old plan again, which would ask for it again


def test_a_plan_that_is_slower_than_it_was_predicted_is_no_reason_to_morph_into_itself() -> None:
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages, predicted_s=lambda plan: 1.25 * plan.step_s)
    driver.begin(0)
    driver.feed(SpawnRequested(1))
    driver.hello("w4")
    assert not sends(driver.wait(3.0), RaiseFlag)
    assert "w4 joined as spare" in driver.told(Notice)[-1].text


def test_a_run_learns_from_losses_as_from_gains() -> None:
    driver = Driver(FleetConfig(workers=2, replace=False))
    driver.gather()
    driver.feed(SpawnRequested(1))
    driver.hello("w2")
    assert driver.fleet.experience.changes == 1
    driver.wait(60)
    driver.kill("w2")
    assert driver.fleet.experience.changes == 2
