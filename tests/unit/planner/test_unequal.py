"""Workers of different speed: how much of their sum a plan reaches, and that it is never worse than fewer of them."""

import pytest

from tests.unit.planner.models import FAST, MB, calibrated, model, request, section
from varuna.core.devices import WorkerGroup
from varuna.core.plan import Plan
from varuna.planner.choose import best_plan

FACTS = model([section(parameter_bytes=MB)] * 24)
KNOWN = calibrated(FACTS, across_vms=FAST)


def best(speeds: tuple[float, ...], global_batch: int = 256, **rest: object) -> Plan:
    workers = tuple(WorkerGroup(count=1, speed=speed) for speed in speeds)
    return best_plan(request(FACTS, workers, global_batch, micro_batch=1, calibration=KNOWN, **rest))


def alone(workers: int, global_batch: int = 256) -> Plan:
    return best_plan(request(FACTS, workers, global_batch, micro_batch=1, calibration=KNOWN))


@pytest.mark.parametrize("slow", [2, 4])
def test_two_fast_and_some_slow_workers_reach_the_sum_of_their_speeds(slow: int) -> None:
    plan = best((1.0, 1.0, *(0.5,) * slow))
    bound_s = alone(1).step_s / (2 + slow / 2)
    assert plan.step_s <= 1.08 * bound_s
    assert alone(2 + slow).step_s / 0.5 >= 1.3 * plan.step_s  # all treated as the slowest
    assert len(plan.micro_batches_of(0)) == pytest.approx(2 * len(plan.micro_batches_of(plan.replicas - 1)), abs=2)


def test_pipelines_are_of_one_speed_where_that_is_possible() -> None:
    plan = best((1.0, 1.0, 1.0, 1.0, 0.4, 0.4, 0.4, 0.4), stages=4)
    assert plan.speeds == (1.0, 0.4)
    counts = [len(plan.micro_batches_of(replica)) for replica in range(2)]
    assert counts[0] > 2 * counts[1]


def test_workers_that_would_end_last_idle() -> None:
    plan = best((1.0, 1.0, 0.01), global_batch=16)
    assert plan.workers == 2
    assert plan.speeds == ()


@pytest.mark.parametrize("speed", [0.9, 0.5, 0.2, 0.05])
def test_a_slow_worker_more_never_makes_the_step_longer(speed: float) -> None:
    for fast in range(1, 6):
        with_it = best((*(1.0,) * fast, speed), global_batch=64)
        assert with_it.step_s <= alone(fast, 64).step_s * (1 + 1e-9)


def test_equal_workers_are_planned_as_ever() -> None:
    assert best((1.0,) * 8) == alone(8)


def test_speeds_that_cannot_be_are_refused() -> None:
    for speed in (2.0, 0.0):
        with pytest.raises(ValueError, match="speed"):
            WorkerGroup(count=1, speed=speed)


def test_workers_may_be_listed_in_any_order() -> None:
    assert best((0.5, 1.0, 0.25, 1.0)) == best((1.0, 1.0, 0.5, 0.25))
