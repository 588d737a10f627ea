"""A step that takes much longer than others is told once, with what the ranks do."""

from dataclasses import replace

from tests.unit.fleet.support import Driver, two_stages
from varuna.core.messages import Beat
from varuna.fleet.machine.standstill import stillness
from varuna.fleet.page.phases import phase_of
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import Tick, WorkerSpawned
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import Notice


def still(driver: Driver, seconds: float, activities: dict[str, str]) -> list[str]:
    """Notices while workers do the same; who waits says so."""
    before = len(driver.told(Notice))
    for _ in range(int(seconds)):
        driver.now_s += 1.0
        for name, activity in activities.items():
            at_work = "waits" not in activity
            driver.say(name, Beat(generation=0, step=2, activity=activity, at_work=at_work))
        driver.feed(Tick())
    return [notice.text for notice in driver.told(Notice)[before:]]


def running() -> Driver:
    driver = Driver(FleetConfig(workers=4), plan=two_stages)
    driver.begin(0)
    driver.wait(1.0)
    driver.voted(1)
    return driver


def test_code_of_the_training_loop_that_takes_long_is_told_once() -> None:
    waits = dict.fromkeys(("w1", "w2", "w3"), "runs step 2: waits for the vote")
    doing = {"w0": "runs the code of the training loop after step 1", **waits}
    driver = running()
    assert still(driver, 44, doing) == []
    assert still(driver, 100, doing) == [
        "no step for 45 s: rank 0 runs the code of the training loop after step 1. The other 3 wait"
    ]
    driver.voted(2)
    assert still(driver, 44, doing) == []


def test_a_manager_that_resumes_does_not_count_from_the_beginning_of_time() -> None:
    driver = running()
    driver.fleet = replace(driver.fleet, recorded=replace(driver.fleet.recorded, at_s=0.0))
    driver.now_s += 1e6
    assert still(driver, 5, {"w0": "runs step 2: waits for the vote"}) == []


def test_steps_that_are_long_as_a_rule_are_not_told() -> None:
    driver = running()
    waits = dict.fromkeys(("w0", "w1", "w2", "w3"), "runs step 2: waits for the vote")
    still(driver, 100, waits)
    driver.voted(2)  # after 100 s
    assert still(driver, 250, waits) == []
    [told] = still(driver, 60, waits)
    assert told == (
        "no step for 300 s: rank 0 runs step 2: waits for the vote; rank 1 runs step 2: waits for the vote; "
        "rank 2 runs step 2: waits for the vote; and 1 more"
    )


def test_a_run_without_a_step_for_long_says_what_its_ranks_do() -> None:
    driver = running()
    driver.now_s += 1.0
    for name in ("w1", "w2", "w3"):
        driver.say(name, Beat(generation=0, step=2, activity="runs step 2: waits for rank 0"))
    driver.say("w0", Beat(generation=0, step=2, activity="runs the code of the training loop", at_work=True))
    assert stillness(driver.fleet, driver.fleet.recorded.at_s + 44) is None
    found = stillness(driver.fleet, driver.fleet.recorded.at_s + 46)
    assert found == (46.0, "rank 0 runs the code of the training loop. The other 3 wait")


def test_a_run_that_waits_for_machines_says_how_many_and_who_went() -> None:
    config = FleetConfig(workers=4, elastic=True, replace=False, wait_s=float("inf"))
    driver = Driver(config, plan=two_stages)
    for number in range(4):
        driver.feed(WorkerSpawned(f"w{number}", f"vm{number}"))
    driver.begin(0, 1)
    for name in ("w1", "w2", "w3"):
        driver.kill(name)
    driver.held("w0", 2)
    driver.wait(100)
    found = stillness(driver.fleet, driver.fleet.recorded.at_s + 2)
    causes = "(worker w1 killed by SIGKILL; worker w2 killed by SIGKILL; worker w3 killed by SIGKILL)"
    why = f"2 stages need 2 workers, 1 are there {causes}"
    assert found == (2.0, why), "no time has to pass where no plan fits"
    assert driver.told(Notice)[-1].text == f"waiting for machines to join: {why}"


def test_before_the_first_step_a_run_says_how_many_are_there_and_what_they_are_too_few_for() -> None:
    driver = Driver(FleetConfig(workers=2, elastic=True, replace=False, wait_s=float("inf")), plan=two_stages)
    driver.wait(1.0)
    assert phase_of(driver.fleet) == "waiting for machines: 0 of 2 workers have joined"
    driver.feed(WorkerSpawned("w0", "vm0"))
    driver.hello("w0")
    assert phase_of(driver.fleet) == "waiting for machines: 1 of 2 workers have joined"
    driver.wait(200.0)
    assert phase_of(driver.fleet) == "waiting: 2 stages need 2 workers, 1 are there"


def test_the_way_to_the_first_step_may_take_longer_and_a_run_that_is_over_waits_for_nothing() -> None:
    driver = Driver(FleetConfig(workers=2), plan=two_stages)
    began_s = driver.fleet.experience.began_s
    assert stillness(driver.fleet, began_s + 299) is None
    found = stillness(driver.fleet, began_s + 301)
    assert found == (301.0, "waiting for workers: 0 of 2 workers have joined")
    driver = running()
    driver.fleet = replace(driver.fleet, phase=Ended(0, "done"))
    assert stillness(driver.fleet, 1e9) is None
