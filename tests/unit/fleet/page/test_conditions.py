from dataclasses import replace
from typing import Any

from tests.unit.fleet.support import Driver, by_class, two_stages
from varuna.core.messages import Beat
from varuna.fleet.page.conditions import slowness
from varuna.fleet.page.status import describe
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.contacts import Contacts
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.machines import Departure, Machines
from varuna.fleet.state.phases import Finishing
from varuna.fleet.state.worker import WorkerStatus


def conditions(driver: Driver) -> dict[str, tuple[str, str]]:
    workers: Any = describe(driver.fleet, driver.now_s)["workers"]
    return {worker["name"]: (worker["condition"], worker["words"]) for worker in workers}


def silent(fleet: Fleet, listened_s: float) -> Contacts:
    return replace(fleet.contacts, listened_s=listened_s, progressed_s=float("-inf"))


def trained() -> Driver:
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
    driver.begin(0)
    for name in driver.fleet.members:
        driver.say(name, Beat(generation=0, step=0, activity=""))
    return driver


def test_workers_of_a_run_that_trains_work() -> None:
    assert set(conditions(trained()).values()) == {("ok", "works")}


def test_a_silent_worker_is_silent_before_its_lease_is_over() -> None:
    driver = trained()
    fleet = driver.fleet
    worker = fleet.workers["w1"]
    driver.fleet = replace(fleet, contacts=silent(fleet, fleet.seen_s(worker) + 4.0))
    assert conditions(driver)["w1"] == ("silent", "silent for 4.0 s")


def test_nobody_is_called_silent_while_scripts_run_to_their_ends() -> None:
    driver = trained()
    fleet = driver.fleet
    seen_s = fleet.seen_s(fleet.workers["w1"])
    driver.fleet = replace(fleet, contacts=silent(fleet, seen_s + 4.0), phase=Finishing())
    assert conditions(driver)["w1"] == ("ok", "works")


def test_a_machine_that_will_leave_comes_before_all_else() -> None:
    driver = trained()
    node = driver.fleet.workers["w1"].node
    driver.fleet = replace(
        driver.fleet, machines=Machines(departing={node: Departure(deadline_s=1e9, reason="drained")})
    )
    assert conditions(driver)["w1"] == ("leaving", "its machine will leave")


def test_who_starts_is_not_called_silent() -> None:
    driver = Driver(FleetConfig(workers=2, replace=False), plan=two_stages)
    driver.gather()
    driver.fleet = replace(
        driver.fleet,
        workers=driver.fleet.workers.with_worker(replace(driver.fleet.workers["w1"], standing=WorkerStatus.STARTING)),
    )
    assert conditions(driver)["w1"] == ("wait", "starting")


def test_slowness_is_against_the_median_of_the_same_stage() -> None:
    driver = trained()
    members, fleet = driver.fleet.members, driver.fleet
    for name, compute_s in zip(members, (0.1, 0.4, 0.3, 0.4), strict=True):
        fleet = replace(fleet, workers=fleet.workers.with_worker(replace(fleet.workers[name], compute_s=compute_s)))
    driver.fleet = fleet
    first, second, third, fourth = members  # stages 0 1 0 1
    assert slowness(fleet) == {first: 1.0, third: 0.3 / 0.1, second: 1.0, fourth: 1.0}
    assert conditions(driver)[third] == ("slow", "3.00 times the compute of its peers")
    assert conditions(driver)[first][0] == "ok"


def test_whoever_idles_is_told_why() -> None:
    driver = Driver(FleetConfig(workers=5, slow_ratio=1.5), plan=two_stages)
    driver.gather()
    assert conditions(driver)["w4"] == ("wait", "2x2 is the best plan for 5 workers")
    driver.voted(0, 1)
    driver.kill("w4")  # its replacement comes when the plan is made
    driver.hello("w5")
    assert conditions(driver)["w5"] == ("wait", "it came after the plan was made")
    driver.wait(5.0)
    assert conditions(driver)["w5"] == ("wait", "to take it in would cost more than it brings")


def test_classes_are_named_where_one_idles() -> None:
    driver = Driver(
        FleetConfig(workers=4, replace=False), plan=by_class, class_of=lambda name: "b" if name == "w3" else "a"
    )
    driver.gather()
    assert driver.fleet.record.plan.classes == {"a": 2, "b": 1}
    assert conditions(driver)["w2"] == ("wait", "2x1+1x1 is the best plan for 3 a and 1 b")
    workers: Any = describe(driver.fleet, driver.now_s)["workers"]
    assert [worker["device_class"] for worker in workers] == ["a", "a", "a", "b"]
