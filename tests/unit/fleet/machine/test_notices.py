"""Notices in the middle of long steps: waited for, or broken off while the leaver lives; never for anybody else."""

from dataclasses import replace

import pytest

from tests.unit.fleet.machine.test_preemption import flags, on_nodes
from tests.unit.fleet.support import Driver, preempted, sends, with_history
from varuna.core.messages import Finish, Hold, WorkerPhase
from varuna.fleet.state.inputs import DrainRequested, SpawnRequested, WorkerSpawned
from varuna.fleet.state.phases import Running, Stopping
from varuna.fleet.state.run_events import Notice
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.stutter import Straggler


def in_long_step(nodes: str, wall_s: float = 100.0) -> Driver:
    """Steps take minutes; the step in flight has just begun."""
    driver = on_nodes(nodes, replace=False)
    driver.fleet = replace(driver.fleet, recorded=replace(driver.fleet.recorded, wall_s=wall_s))
    return driver


def holds(driver: Driver) -> list[str]:
    return [worker for worker, message in sends(driver.done, Hold) if message.generation == driver.fleet.generation]


def test_a_step_that_cannot_end_goes_on_until_there_is_just_time_to_hand_over() -> None:
    driver = in_long_step("abc", wall_s=1000.0)
    driver.feed(preempted("b", in_s=220))
    assert flags(driver) == ["regroup"], "should the step end before, all the better"
    driver.wait(70)
    assert not holds(driver)
    driver.wait(15)  # an action of 125 s, a hand-over of 1 s, and 15 s if the node goes early
    assert holds(driver) == ["w0", "w1", "w2"], "the leaver too: its state and sums move"


def test_a_step_that_ends_in_time_is_waited_for() -> None:
    driver = in_long_step("abc", wall_s=60.0)
    driver.feed(preempted("b", in_s=90))
    driver.wait(60)
    assert flags(driver) == ["regroup"]
    assert not holds(driver)


def test_a_step_that_should_have_ended_is_broken_off_at_the_last_moment() -> None:
    driver = in_long_step("abc", wall_s=60.0)
    driver.feed(preempted("b", in_s=90))
    driver.wait(79)
    assert not holds(driver)
    driver.wait(3)  # 90 s less an action of 7.5 s, and a hand-over
    assert holds(driver) == ["w0", "w1", "w2"]


def test_the_earliest_of_several_notices_counts_and_all_leave_in_one_morph() -> None:
    driver = in_long_step("abcd", wall_s=200.0)
    driver.feed(preempted("b", in_s=300))
    driver.feed(preempted("d", in_s=100))
    driver.wait(30)
    assert not holds(driver)
    driver.wait(5)  # 100 s less an action of 50 s, a hand-over of 1.5 s, and 15 s
    assert holds(driver) == ["w0", "w1", "w2", "w3"]
    driver.all_held(2)
    assert driver.fleet.record.grid == ("w0", "w2")


@pytest.mark.parametrize(("steps_run", "whole"), [(False, True), (True, False), (True, True)])
def test_a_leaver_is_let_go_once_all_have_their_state(steps_run: bool, whole: bool) -> None:
    """The first step may take minutes, and the node is gone by then. Optimizer state may come while it runs."""
    driver = in_long_step("abcde")
    driver.feed(preempted("b", in_s=20))
    driver.all_held(2)
    driver.wait(2, phase=WorkerPhase.STEPS if steps_run else WorkerPhase.FORMS, whole=whole)
    is_free = steps_run and whole
    assert [worker for worker, _ in sends(driver.done, Finish)] == ["w1"] * is_free
    driver.kill("w1", code=0 if is_free else -9)
    assert isinstance(driver.fleet.phase, Running if is_free else Stopping)


def test_a_second_notice_waits_for_the_generation_that_forms() -> None:
    """It has moved half of the state: it is broken off only if there is no other time."""
    driver = in_long_step("abcd", wall_s=4.0)
    driver.feed(preempted("b", in_s=5))
    driver.all_held(2)
    members = driver.fleet.members
    node = driver.fleet.workers[members[1]].node
    driver.feed(preempted(node, in_s=12))
    driver.wait(5, phase=WorkerPhase.FORMS)
    assert not holds(driver)
    driver.wait(2, phase=WorkerPhase.STEPS)
    assert [worker for worker, _ in sends(driver.done, Finish)] == ["w1"]
    assert {*holds(driver), "w1"} == set(members)


def test_a_drain_does_not_break_off_a_step_nor_do_newcomers_and_stragglers() -> None:
    driver = in_long_step("abc", wall_s=1e4)
    driver.feed(DrainRequested("b"))
    driver.feed(SpawnRequested(2))
    for name, node in (("w3", "d"), ("w4", "e")):
        driver.feed(WorkerSpawned(name, node))
        driver.hello(name)
    driver.fleet = replace(driver.fleet, speeds=Speeds(slow={"w0": Straggler(2.4, until_s=300.0)}))
    driver.wait(100)
    assert flags(driver) == ["regroup"]
    assert not holds(driver)


def with_newcomer(wall_s: float, *, keeps_sums: bool) -> Driver:
    """Two of three workers have a seat; another one comes, so that there are enough for a second replica."""
    driver = in_long_step("abc", wall_s=wall_s)
    kept = driver.fleet.record.model_copy(update={"kept_micro_batches": 2 if keeps_sums else 0})
    driver.fleet = with_history(driver.fleet, (*driver.fleet.history[:-1], kept))
    driver.feed(WorkerSpawned("w3", "d"))
    driver.hello("w3")
    driver.wait(3)
    return driver


def test_newcomers_do_not_wait_for_the_end_of_a_long_step_whose_sums_are_kept() -> None:
    driver = with_newcomer(400.0, keeps_sums=True)
    assert holds(driver) == ["w0", "w1", "w2"]
    assert any("admitted at once" in notice.text and "another 39" in notice.text for notice in driver.told(Notice))


def test_newcomers_wait_for_the_end_of_a_step_that_would_be_lost_or_is_short() -> None:
    for driver in (with_newcomer(400.0, keeps_sums=False), with_newcomer(10.0, keeps_sums=True)):
        assert flags(driver) == ["regroup"]
        assert not holds(driver)
