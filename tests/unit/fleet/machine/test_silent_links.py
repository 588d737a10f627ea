"""Two machines that cannot reach each other cost a plan without one of them, if the others have all state."""

import pytest

from tests.unit.fleet.support import Driver, make_plan, two_stages
from varuna.core.messages import Suspect
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import Tick, WorkerSpawned
from varuna.fleet.state.outputs import Kill
from varuna.fleet.state.phases import Running
from varuna.fleet.state.run_events import Notice, WorkerLost


def on_machines(nodes: str, *, plan: object = two_stages) -> Driver:
    config = FleetConfig(workers=len(nodes), elastic=True, replace=False, wait_s=float("inf"))
    driver = Driver(config, plan=plan)  # type: ignore[arg-type]
    for number, node in enumerate(nodes):
        driver.feed(WorkerSpawned(f"w{number}", node))
    driver.gather()
    for step in (0, 1):
        driver.now_s += 0.5
        driver.feed(Tick())
        driver.voted(step)
    return driver


def reports(driver: Driver, worker: str, peer: str) -> None:
    """A rank says which one it cannot reach."""
    fleet = driver.fleet
    rank = fleet.members.index(peer)
    driver.say(worker, Suspect(generation=fleet.generation, reason="Connection timed out", peer=rank))


def goes_on(driver: Driver) -> None:
    """The grace is over; whoever is left stops, and the next generation forms."""
    driver.wait(1.5, still=False)
    driver.all_held(driver.fleet.recorded.step + 1)
    assert isinstance(driver.fleet.phase, Running)


def left(driver: Driver) -> list[str]:
    return [event.worker for event in driver.told(WorkerLost)]


@pytest.mark.parametrize(("worker", "peer"), [("w1", "w3"), ("w3", "w1"), ("w0", "w3")])
def test_who_reports_it_is_left_out_and_its_machine_rests(worker: str, peer: str) -> None:
    """2 stages, 2 replicas: each section has two holders."""
    driver = on_machines("abcd")
    reports(driver, worker, peer)
    goes_on(driver)
    assert left(driver) == [worker]
    [killed] = [each for each in driver.done if isinstance(each, Kill)]
    assert killed.rests
    assert driver.fleet.generation == 1
    assert worker not in driver.fleet.members
    [said] = [event.text for event in driver.told(Notice) if event.warning]
    assert said.startswith("nothing gets through between nodes ")
    driver.voted(2, 3)
    assert driver.fleet.recorded.step == 3
    assert not driver.fleet.machines.silences


def test_both_ends_report_and_one_leaves() -> None:
    driver = on_machines("abcd")
    reports(driver, "w1", "w3")
    reports(driver, "w3", "w1")
    goes_on(driver)
    assert len(left(driver)) == 1


def test_a_machine_that_is_cut_off_from_several_leaves_and_they_stay() -> None:
    driver = on_machines("abcd")
    reports(driver, "w0", "w3")
    reports(driver, "w3", "w1")
    reports(driver, "w3", "w0")
    goes_on(driver)
    assert left(driver) == ["w3"]


def test_whom_several_cannot_reach_leaves_and_they_stay() -> None:
    """Such as a machine that stands still while a generation forms."""
    driver = on_machines("abcd")
    for worker in ("w0", "w1", "w2"):
        reports(driver, worker, "w3")
    goes_on(driver)
    assert left(driver) == ["w3"]


def test_all_workers_of_a_machine_leave_and_links_within_one_are_another_matter() -> None:
    driver = on_machines("aabb")
    reports(driver, "w0", "w1")
    goes_on(driver)
    assert not left(driver)
    reports(driver, "w1", "w3")
    goes_on(driver)
    assert left(driver) == ["w0", "w1"]


def test_who_has_state_that_nobody_else_has_stays_and_the_other_end_leaves() -> None:
    driver = on_machines("abc")  # two stages, one replica, and a spare
    spare = next(name for name in driver.fleet.members if not driver.fleet.record.has_seat(name))
    reports(driver, "w0", spare)
    goes_on(driver)
    assert left(driver) == [spare]


def test_two_that_are_both_needed_try_once_more() -> None:
    driver = on_machines("ab")
    reports(driver, "w0", "w1")
    goes_on(driver)
    assert not left(driver)
    assert driver.fleet.generation == 1
    reports(driver, "w0", "w1")
    driver.wait(1.5, still=False)
    assert left(driver) == ["w0"]


def test_a_machine_that_is_not_heard_is_another_matter() -> None:
    driver = on_machines("abcd")
    driver.wait(4, hidden=("d",), still=False)
    reports(driver, "w1", "w3")
    driver.wait(1.5, hidden=("d",), still=False)
    assert not [text for text in driver.told(Notice) if "nothing gets through" in text.text]


def test_a_worker_that_is_dead_is_another_matter_though_its_machine_has_others() -> None:
    driver = on_machines("aabb")
    reports(driver, "w0", "w3")
    driver.kill("w3")
    goes_on(driver)
    assert left(driver) == ["w3"]


def test_nobody_is_put_out_by_what_another_rank_claims() -> None:
    """A liar leaves itself, and a rank that is not there is nobody."""
    driver = on_machines("abcd")
    for peer in ("w0", "w1", "w2"):
        reports(driver, "w3", peer)
    driver.say("w3", Suspect(generation=0, reason="Connection timed out", peer=77))
    goes_on(driver)
    assert left(driver) == ["w3"]


def test_on_one_machine_all_is_as_before() -> None:
    driver = Driver(FleetConfig(workers=4), plan=make_plan)
    driver.begin(0)
    reports(driver, "w1", "w3")
    driver.wait(1.5, still=False)
    assert not left(driver)
