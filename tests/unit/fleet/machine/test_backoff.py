"""Cables between machines are cut while a generation forms: the run waits with growing pauses, and has a bound."""

import pytest

from tests.unit.fleet.machine.test_leases import on_machines, said
from tests.unit.fleet.support import Driver, sends
from varuna.core.messages import RaiseFlag
from varuna.fleet.service.cluster_workers import FUTILE_S
from varuna.fleet.state.inputs import FinishRequested, WorkerSpawned
from varuna.fleet.state.phases import Idle, Running
from varuna.fleet.state.run_events import WorkerLost


def break_again(driver: Driver, next_step: int = 2) -> float:
    """The newest generation cannot form; returns how long it took until the next one was tried."""
    generation = driver.fleet.generation
    driver.breaks(dict.fromkeys(driver.fleet.live_members, next_step))
    since_s = driver.now_s
    while driver.fleet.generation == generation and driver.end is None:
        driver.wait(0.2, still=False)
    return driver.now_s - since_s


def three_that_cannot_form(futile_s: float) -> Driver:
    """The fourth was lost, and the others do not reach each other."""
    driver = on_machines("abcd", futile_s=futile_s)
    driver.kill("w3")
    driver.all_held(2)
    return driver


def test_generations_that_break_one_after_another_are_tried_again_after_growing_pauses() -> None:
    driver = three_that_cannot_form(FUTILE_S)
    pauses_s = [break_again(driver) for _ in range(9)]
    assert pauses_s == pytest.approx([0, 1, 2, 4, 8, 16, 30, 30, 30], abs=0.3)
    assert said(driver, "the 4th in a row, though nobody died (")
    assert said(driver, "again in 30 s, or as soon as another joins; without a step the run ends in 29m")
    driver.voted(2)
    assert (driver.end, driver.fleet.generations.failed, driver.told(WorkerLost)[1:]) == (None, 0, [])


def test_without_any_step_for_long_the_run_ends_and_says_why() -> None:
    driver = on_machines("ab", steps=(), futile_s=100)
    took_s = 0.0
    while driver.end is None:
        took_s += break_again(driver, 0) + 1.2
        assert took_s < 140
    assert took_s > 100
    assert driver.end.exit_code == 1
    assert driver.end.text.startswith("no step in 1m 40s: 8 generations in a row broke before their first step")
    assert "connection timed out" in driver.end.text


def test_who_joins_meanwhile_is_tried_at_once_and_who_is_dropped_does_not_prolong_it() -> None:
    driver = three_that_cannot_form(100)
    for _ in range(6):
        break_again(driver)
    driver.breaks(dict.fromkeys(("w0", "w1", "w2"), 2))
    driver.wait(2, still=False)
    assert isinstance(driver.fleet.phase, Idle)
    driver.feed(WorkerSpawned("w4", "e"))
    driver.hello("w4")
    assert isinstance(driver.fleet.phase, Running)
    since_s = driver.fleet.generations.failing_since_s
    driver.breaks({"w0": 2, "w1": 2, "w2": 2, "w4": None})
    assert [event.worker for event in driver.told(WorkerLost)] == ["w3", "w4"]
    assert driver.fleet.generations.failing_since_s == since_s


def test_whoever_asks_for_the_end_meanwhile_gets_it() -> None:
    driver = three_that_cannot_form(FUTILE_S)
    for _ in range(5):
        break_again(driver)
    driver.breaks(dict.fromkeys(("w0", "w1", "w2"), 2))
    driver.feed(FinishRequested("somebody asked for it"))
    assert driver.end is not None
    assert "no step is running, because generation 6 broke before its first step" in driver.end.text


def test_a_run_that_is_to_end_tries_once_more_before_it_ends_without_its_last_step() -> None:
    driver = three_that_cannot_form(FUTILE_S)
    driver.feed(FinishRequested("somebody asked for it"))
    assert break_again(driver) == pytest.approx(0, abs=0.3)
    assert driver.end is None
    driver.voted(2)
    assert sends(driver.done, RaiseFlag)[-1][1].flag == "stop"
