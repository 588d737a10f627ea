"""Each pipeline gets workers of one speed, and no more state moves than that takes."""

from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.fleet.support import by_class, candidates, make_job, make_plan
from varuna.core.devices import WorkerGroup
from varuna.core.plan import Plan
from varuna.fleet.machine.placement import seat, transfers

JOB = make_job(sections=4).model_copy(update={"global_batch": 64})
EVEN = (1, 1, 1, 1)
FRONT, BACK = frozenset({0, 1}), frozenset({2, 3})


def dealt(workers: int, speeds: tuple[float, ...], stages: int = 2) -> Plan:
    return make_plan(JOB, workers, None, stages=stages).at_speeds(
        tuple(WorkerGroup(count=1, speed=speed) for speed in speeds)
    )


def test_stages_change_pipelines_and_no_state_moves() -> None:
    plan = dealt(4, (1.0, 1.0, 0.5, 0.5))
    holdings = {"a": FRONT, "b": BACK, "c": FRONT, "d": BACK}
    members = seat(plan, candidates(["a", "b", "c", "d"], holdings, speeds={"a": 0.5, "d": 0.5}), EVEN)
    assert members == ("c", "b", "a", "d")
    assert transfers(plan, members, holdings, EVEN) == ()


def test_the_slowest_are_the_spares() -> None:
    plan = dealt(5, (1.0, 1.0, 0.5, 0.5, 0.25))
    members = seat(plan, candidates(["a", "b", "c", "d", "e"], speeds={"a": 0.25, "b": 0.5, "c": 0.5}), EVEN)
    assert members == ("d", "e", "b", "c", "a")


def test_optimizer_state_that_is_shared_out_stays_where_it_is() -> None:
    plan = dealt(3, (1.0, 1.0, 0.5), stages=1)
    holders = ((0, 1), (1, 2), (2, 0), (0, 1))
    whole = [frozenset(s for s, each in enumerate(holders) if replica in each) for replica in range(3)]
    holdings = {"a": whole[1], "b": whole[0], "c": whole[2]}
    members = seat(plan, candidates(["a", "b", "c"], holdings, speeds={"c": 0.5}), EVEN, holders=holders)
    assert members == ("b", "a", "c")


@given(st.integers(1, 4), st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12))
@example(3, [1.0, 1.0, 0.5, 1.0])
def test_no_pipeline_is_slower_than_its_plan_says(stages: int, values: list[float]) -> None:
    names = [f"w{number}" for number in range(max(len(values), stages))]
    speeds = dict(zip(names, values, strict=False))
    ordered = tuple(sorted((speeds.get(name, 1.0) for name in names), reverse=True))
    plan = dealt(len(names), ordered, stages)
    members = seat(plan, candidates(names, speeds=speeds), EVEN)
    assert sorted(members) == sorted(names)
    for rank, name in enumerate(members[: plan.workers]):
        assert speeds.get(name, 1.0) >= plan.speed_of(plan.place_of(rank).replica)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1.0, 0.8, 0.5, 0.1])), min_size=1, max_size=12))
def test_seats_of_a_class_go_to_its_workers_by_their_speed(workers: list[tuple[str, float]]) -> None:
    classes = {f"w{number}": name for number, (name, _) in enumerate(workers)}
    speeds = {f"w{number}": speed for number, (_, speed) in enumerate(workers)}
    plan = by_class(JOB, tuple(WorkerGroup.of_class(name, 1, speed=speed) for name, speed in workers), None)
    members = seat(plan, candidates(classes, classes=classes, speeds=speeds), EVEN)
    assert sorted(members) == sorted(classes)
    for rank, name in enumerate(members[: plan.workers]):
        assert plan.class_of(rank) == classes[name]
        assert speeds[name] >= plan.speed_of(plan.place_of(rank).replica)


def test_a_plan_that_is_kept_seats_whoever_is_nearly_fast_enough() -> None:
    plan = dealt(4, (1.0, 1.0, 0.5, 0.5))
    members = seat(plan, candidates(["a", "b", "c", "d", "e"], speeds={"a": 0.1, "b": 0.46, "c": 0.47}), EVEN)
    assert members == ("d", "e", "b", "c", "a")
