"""The m with which plans are made, and its reason."""

import pytest

from varuna.calibration.format import Calibration, Calibrations, Hardware, ModelIdentity, SectionKind, SectionRun
from varuna.calibration.nominal import ETHERNET
from varuna.core.devices import equal_workers
from varuna.planner.asking.request import PlanRequest
from varuna.planner.micro_batch import candidate_sizes, describe_sizes, knows_sizes


def calibration(per_example_ms: dict[int, float], *, sized_for: int = 0) -> Calibration:
    """One section that takes so many milliseconds for F and B of an example, by m."""
    kind = SectionKind(
        micro_batches=tuple(per_example_ms),
        forward_s=tuple(m * ms / 3000 for m, ms in per_example_ms.items()),
        backward_s=tuple(m * ms / 1500 for m, ms in per_example_ms.items()),
        activation_bytes=1,
        boundary_bytes=0,
        parameter_bytes=1,
        trainable_bytes=1,
        optimizer_bytes=1,
    )
    return Calibration(
        hardware=Hardware(name="h"),
        model=ModelIdentity(name="m"),
        sized_for=sized_for,
        kinds={"k": kind},
        sections=(SectionRun(kinds=("k",)),),
        across_vms=ETHERNET,
    )


def first_sizes(known: Calibration, global_batch: int) -> tuple[int, ...]:
    return next(
        candidate_sizes(
            PlanRequest(calibrations=Calibrations.of_one(known), workers=equal_workers(1), global_batch=global_batch)
        )
    )


@pytest.mark.parametrize(
    ("per_example_ms", "sizes"),
    [
        ({1: 4.0, 2: 2.0, 4: 1.0, 8: 1.0, 16: 1.0}, (1, 2, 4)),
        ({1: 1.0, 2: 0.98, 4: 0.96, 8: 0.95, 16: 0.945}, (1, 2, 4, 8)),
        ({1: 1.0, 2: 1.1, 4: 1.2}, (1,)),
    ],
)
def test_sizes_are_tried_up_to_the_lowest_than_which_none_is_better(
    per_example_ms: dict[int, float], sizes: tuple[int, ...]
) -> None:
    assert first_sizes(calibration(per_example_ms), 64) == sizes


def test_where_time_ended_the_sizes_early_a_larger_one_is_tried_too() -> None:
    known = calibration({1: 4.0, 2: 2.0})
    assert first_sizes(known, 1024) == (1, 2, 32)
    assert first_sizes(known, 64) == (1, 2)


@pytest.mark.parametrize(
    ("known", "global_batch", "enough"),
    [
        (calibration({1: 4.0, 2: 2.0, 4: 1.0}), 4, True),
        (calibration({1: 4.0, 2: 2.0, 4: 1.0}), 8, False),
        (calibration({1: 1.0, 2: 0.5, 4: 0.5, 8: 0.5}), 1024, True),
        (calibration({1: 1.0}), 1, False),
        (calibration({1: 1.0}, sized_for=64), 64, True),
        (calibration({1: 1.0}, sized_for=64), 65, False),
    ],
)
def test_a_job_is_measured_again_only_if_larger_sizes_may_be_better(
    known: Calibration, global_batch: int, enough: bool
) -> None:
    assert knows_sizes(known, global_batch) is enough


def test_the_choice_is_explained_by_its_rates() -> None:
    known = calibration({1: 4.0, 2: 2.0, 4: 1.0})
    assert describe_sizes(known, 4) == "micro-batches of 4: 1,000 examples/s on one worker; 1: 250, 2: 500"
