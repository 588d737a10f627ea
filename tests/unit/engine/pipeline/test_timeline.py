import pytest

from varuna.engine.pipeline.timeline import StepTimes, interval_of
from varuna.schedule.actions import Action, Kind


def times(*actions: tuple[str, int, float]) -> StepTimes:
    rows = tuple(interval_of(Action(0, Kind(kind), micro_batch), 10.0, 10.0 + s) for kind, micro_batch, s in actions)
    return StepTimes(3, 10.0, 20.0, rows, ())


def test_a_micro_batch_costs_its_forward_and_all_that_its_backward_takes() -> None:
    split = times(("F", 0, 1), ("F", 1, 1), ("R", 0, 1), ("B", 0, 2), ("R", 1, 1), ("I", 1, 1.2), ("W", 1, 0.8))
    assert split.per_micro_batch_s() == pytest.approx((1, 3))


def test_one_hiccup_does_not_count() -> None:
    rows = [("F", j, 9.0 if j == 2 else 1.0) for j in range(5)] + [("B", j, 9.0 if j == 3 else 2.0) for j in range(5)]
    assert times(*rows).per_micro_batch_s() == pytest.approx((1, 2))


def test_a_stage_without_forwards_of_its_own_costs_its_backward() -> None:
    assert times(("R", 0, 1), ("B", 0, 2)).per_micro_batch_s() == pytest.approx((0, 3))
