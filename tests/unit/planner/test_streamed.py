"""Frozen parameters in host memory: what a stage keeps of them, what each pass waits for, and when a plan does it."""

from typing import Any

import pytest

from tests.unit.planner.models import FAST, GB, MB, calibrated, model, section
from varuna.calibration.format import Calibrations, Hardware
from varuna.core.devices import STAGING_BYTES, WorkerGroup, equal_workers
from varuna.core.errors import NoPlanError
from varuna.core.model import JobFacts, Memory, ModelFacts, SectionFacts
from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import plan_run
from varuna.planner.pricing.costs import Pricer
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spans import Spans
from varuna.planner.pricing.stage_size import Size, Sizer
from varuna.planner.sweep import rank_plans


def frozen(seconds: float = 0.005) -> SectionFacts:
    """100 MB of parameters, of which 1 MB is trained."""
    small = {"trainable_bytes": MB, "optimizer_bytes": 2 * MB, "frozen_bytes": 99 * MB}
    return section(forward_s=seconds, activation_bytes=MB).model_copy(update=small)


EIGHT = model([frozen()] * 8)


def sizer(*, streams: bool, stages: int = 1) -> Sizer:
    spans = Spans(profile(calibrated(EIGHT), 1, streams_frozen=streams))
    return Sizer([spans] * stages, wanted=[1] * stages, least=[1] * stages, may_keep=False)


def job(facts: ModelFacts = EIGHT, *, streams: bool = False, apart: bool = True) -> JobFacts:
    memory = Memory(stream_frozen=streams)
    return JobFacts(model=facts, global_batch=16, micro_batch=1, seed=0, steps=1, memory=memory, memory_apart=apart)


def planned(memory_bytes: int | None, *, workers: int = 1, facts: ModelFacts = EIGHT, **asked: Any) -> Plan:
    hardware = Hardware(name="test", memory_bytes=memory_bytes)
    known = calibrated(facts, hardware=hardware, across_vms=FAST, to_device_bytes_per_s=asked.pop("rate", None))
    return plan_run(job(facts, **asked), workers=equal_workers(workers), calibrations=Calibrations.of_one(known))


def test_a_device_has_the_parameters_of_two_sections() -> None:
    here, passing = (sizer(streams=streams).detail(0, 0, 8, Size(1, 0)) for streams in (False, True))
    assert here.parameters == 800 * MB
    assert passing.parameters == (8 + 2 * 99) * MB
    assert here.total - passing.total == 6 * 99 * MB


def test_stages_of_two_sections_stream_nothing() -> None:
    here, passing = (sizer(streams=streams, stages=4).detail(0, 0, 2, Size(1, 0)) for streams in (False, True))
    assert here == passing
    assert profile(calibrated(EIGHT), 1, streams_frozen=True).pass_s(0, 2) == 0.0


def test_host_memory_beside_a_device_holds_all_of_them() -> None:
    more = [planned(10 * GB, streams=streams).first.host_bytes for streams in (False, True)]
    assert more[1][0] - more[0][0] == 8 * 99 * MB
    assert more[0][0] == pytest.approx(8 * 102 * MB + STAGING_BYTES)
    assert planned(10 * GB, streams=True, apart=False).first.host_bytes == ()  # there they are in a file


@pytest.mark.parametrize(("forward_s", "waits"), [(0.1, False), (0.001, True)])
def test_passes_wait_for_parameters_that_come_later_than_sections_compute(forward_s: float, waits: bool) -> None:
    known = calibrated(model([frozen(forward_s)] * 8), to_device_bytes_per_s=10 * GB, action_s=0.0)
    came_s = 8 * 99 * MB / (10 * GB)

    def costs(*, streams: bool) -> tuple[float, float, float]:
        pricer = Pricer(profile(known, 1, streams_frozen=streams), gpus_per_vm=1)
        [stage] = pricer.costs((0,), (Size(1, 0),), replicas=1, micro_batches=1, splits=False).stages
        return stage.forward_s, stage.recompute_s, stage.backward_s

    assert costs(streams=True) == (pytest.approx((came_s,) * 3) if waits else costs(streams=False))


def test_a_plan_streams_where_nothing_else_fits() -> None:
    assert not planned(2 * GB).streams_frozen
    narrow = planned(400 * MB)
    assert narrow.streams_frozen
    assert max(narrow.first.memory_bytes) <= 400 * MB
    with pytest.raises(NoPlanError, match=r"needs [\d.]+ MiB but each worker has 143 MiB"):
        planned(150 * MB)


def test_a_plan_streams_where_that_is_clearly_faster_at_a_rate_that_was_measured() -> None:
    """Two pipelines where, with all parameters on the device, two workers are one."""
    slow = model([frozen(0.1)] * 8)
    assert planned(700 * MB, workers=2, facts=slow).shape == "2x1"
    faster = planned(700 * MB, workers=2, facts=slow, rate=20 * GB)
    assert (faster.shape, faster.streams_frozen) == ("1x2", True)
    assert not planned(700 * MB, workers=2, facts=slow, rate=0.1 * GB).streams_frozen


def test_a_job_that_asks_for_it_streams_in_any_case() -> None:
    assert planned(None, streams=True).streams_frozen


def test_models_whose_parameters_are_all_trained_are_asked_once() -> None:
    trained = calibrated(model([section()] * 4))
    assert not PlanRequest(
        calibrations=Calibrations.of_one(trained), workers=equal_workers(1), global_batch=4, memory_bytes=GB
    ).may_stream


def test_classes_of_devices_stream_together() -> None:
    """A model that fits no class alone streams in all of them: a plan says it once."""
    one = calibrated(EIGHT, hardware=Hardware(name="a", memory_bytes=400 * MB))
    other = calibrated(EIGHT, hardware=Hardware(name="b", memory_bytes=420 * MB))
    known = Calibrations(classes={"a": one, "b": other})
    workers = tuple(WorkerGroup.of_class(name, 1) for name in ("a", "b"))
    asked = PlanRequest(calibrations=known, workers=workers, global_batch=16, micro_batch=1)
    best = rank_plans(asked).plans[0]
    assert best.streams_frozen
    assert best.workers == 2
