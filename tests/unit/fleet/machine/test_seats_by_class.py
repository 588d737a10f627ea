"""A pipeline that is for a class of devices gets workers of that class, and plans count them by class."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fleet.support import Driver, by_class, candidates, make_job, make_plan
from varuna.core.devices import WorkerGroup
from varuna.core.plan import Plan
from varuna.fleet.machine.choosing import can_seat
from varuna.fleet.machine.placement import seat, transfers
from varuna.fleet.state.config import FleetConfig

JOB = make_job(sections=4).model_copy(update={"global_batch": 64})
EVEN = (1, 1, 1, 1)
ALL, FRONT, BACK = frozenset(range(4)), frozenset({0, 1}), frozenset({2, 3})


def plan_of(**workers: int) -> Plan:
    return by_class(JOB, tuple(WorkerGroup.of_class(name, count) for name, count in workers.items()), None)


def test_state_stays_where_it_is_within_a_class() -> None:
    plan = plan_of(a=2, b=1)
    classes = {"w0": "b", "w1": "a", "w2": "a"}
    holdings = {"w0": ALL, "w1": BACK, "w2": FRONT}
    members = seat(plan, candidates(["w0", "w1", "w2"], holdings, classes=classes), EVEN)
    assert members == ("w2", "w1", "w0")
    assert transfers(plan, members, holdings, EVEN) == ()


def test_state_moves_rather_than_a_worker_to_another_class() -> None:
    plan = plan_of(a=2, b=1)
    members = seat(plan, candidates(["w0", "w1", "w2"], {"w0": FRONT}, classes={"w0": "b", "w1": "a", "w2": "a"}), EVEN)
    assert members == ("w1", "w2", "w0")


def test_a_plan_for_any_class_seats_whoever_comes_first() -> None:
    plan = make_plan(JOB, 2, None, stages=2)
    assert seat(plan, candidates(["w0", "w1"], {"w0": BACK, "w1": FRONT}, classes={"w0": "a"}), EVEN) == ("w1", "w0")


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.data())
def test_every_rank_is_on_a_device_that_its_plan_is_for(names: list[str], data: st.DataObject) -> None:
    classes = {f"w{number}": name for number, name in enumerate(names)}
    plan = plan_of(**{name: names.count(name) for name in sorted(set(names))})
    held = st.sets(st.integers(0, 3)).map(frozenset)
    holdings = {worker: data.draw(held) for worker in classes if data.draw(st.booleans())}
    members = seat(plan, candidates(classes, holdings, classes=classes), EVEN)
    assert sorted(members) == sorted(classes)
    for rank, worker in enumerate(members[: plan.workers]):
        assert plan.class_of(rank) == classes[worker]


def gathered(*classes: str) -> Driver:
    driver = Driver(
        FleetConfig(workers=len(classes), replace=False), plan=by_class, class_of=lambda name: classes[int(name[1:])]
    )
    driver.begin(0, 1)
    return driver


def test_the_planner_is_told_of_classes_and_their_workers_get_the_seats() -> None:
    driver = gathered("a", "b", "a")
    record = driver.fleet.record
    assert record.plan.classes == {"a": 2, "b": 1}
    assert record.grid == ("w0", "w2", "w1")
    assert driver.fleet.generations.planned_for == {"a": 2, "b": 1}


def test_who_is_left_of_a_class_is_counted_by_class() -> None:
    driver = gathered("a", "b", "a", "b")
    plan = driver.fleet.record.plan
    assert can_seat(driver.fleet, plan, ("w0", "w1", "w2", "w3"))
    assert not can_seat(driver.fleet, plan, ("w0", "w1", "w2"))
    driver.kill("w0")
    driver.all_held(2)
    assert driver.fleet.record.plan.classes == {"b": 2, "a": 1}
    assert driver.fleet.record.steps_redone <= 1
