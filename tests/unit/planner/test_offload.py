"""Offloaded optimizer state: what leaves the device, what of it passes through, and what host memory has to hold."""

from typing import Any

import pytest

from tests.unit.planner.models import GB, MB, calibrated, model, section
from varuna.calibration.format import Calibration, Calibrations, Hardware, OptimizerCosts
from varuna.core.devices import STAGING_BYTES, equal_workers
from varuna.core.errors import NoPlanError
from varuna.core.job_difference import first_difference
from varuna.core.model import JobFacts, Memory
from varuna.core.plan import Plan
from varuna.planner.choose import plan_run
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spans import Spans, pinned_bytes
from varuna.planner.pricing.stage_size import Size, Sizer

FOUR = model([section()] * 4)  # of each 100 MB of parameters and of gradients, and 200 MB of state


EIGHT = model([section()] * 8)


def job(*, offloaded: bool, apart: bool = True) -> JobFacts:
    memory = Memory(offload_optimizer=offloaded)
    return JobFacts(model=EIGHT, global_batch=16, micro_batch=1, seed=0, steps=1, memory=memory, memory_apart=apart)


def planned(stages: int = 2, *, offloaded: bool = True, apart: bool = True, **hardware: Any) -> Plan:
    memory = {"memory_bytes": 10 * GB, **hardware}
    calibration = calibrated(EIGHT, hardware=Hardware(name="test", **memory))
    return plan_run(
        job(offloaded=offloaded, apart=apart),
        workers=equal_workers(stages),
        stages=stages,
        calibrations=Calibrations.of_one(calibration),
    )


def sizer(calibration: Calibration, stages: int) -> Sizer:
    spans = Spans(profile(calibration, 1))
    return Sizer([spans] * stages, wanted=[1] * stages, least=[1] * stages, may_keep=False, tentative=True)


PINNED = 4 * 300 * MB + STAGING_BYTES  # for four sections of a checkpoint, and what is on its way
STREAMED = (2 * 200 + 2 * 100) * MB  # two sections' state, and what is in the middle of an update of one


def test_state_moves_to_host_memory_and_two_sections_of_it_pass_through() -> None:
    here = sizer(calibrated(FOUR), 2).detail(0, 0, 2, Size(1, 0))
    there = sizer(calibrated(FOUR).offloaded(), 2).detail(0, 0, 2, Size(1, 0))
    assert (here.optimizer, here.update, here.host) == (400 * MB, 600 * MB, 0)
    assert (there.optimizer, there.staged, there.update, there.host) == (0, STREAMED, 0, (400 + 600) * MB)
    in_flight = there.stash + there.kept + there.live + there.messages
    assert here.total - there.total == (400 + 600) * MB - STREAMED - in_flight  # a stream's memory is not given back


def test_a_lone_stage_copies_nothing_but_streams() -> None:
    alone = sizer(calibrated(FOUR).offloaded(), 1).detail(0, 0, 4, Size(1, 0))
    assert (alone.optimizer, alone.staged, alone.update, alone.host) == (0, STREAMED, 0, 800 * MB)
    last = sizer(calibrated(FOUR).offloaded(), 2).detail(1, 3, 4, Size(1, 0))
    assert last.staged == 300 * MB  # no more than there is


def test_host_memory_that_is_the_devices_own_relieves_nothing() -> None:
    here = sizer(calibrated(FOUR), 2).detail(0, 0, 2, Size(1, 0))
    same = sizer(calibrated(FOUR).offloaded(apart=False), 2).detail(0, 0, 2, Size(1, 0))
    assert same.total == here.total + 2 * 200 * MB  # there the next section comes after the update, not beside it
    assert same.host == 0


def test_a_calibration_that_says_where_state_lives_is_believed() -> None:
    slow = calibrated(FOUR, optimizer=OptimizerCosts(fixed_s=1.0, host_bytes_per_s=1 * MB))
    assert slow.offloaded() is slow
    assert calibrated(FOUR).offloaded().optimizer.host_bytes_per_s == pytest.approx(12e9)


def test_a_jobs_plan_counts_it() -> None:
    plain, moved = planned(offloaded=False), planned()
    assert plain.first.host_bytes == (PINNED, PINNED)
    assert moved.first.host_bytes == (2000 * MB + PINNED,) * 2
    assert max(moved.first.memory_bytes) < max(plain.first.memory_bytes)
    assert min(planned(apart=False).first.memory_bytes) > max(moved.first.memory_bytes)
    with pytest.raises(NoPlanError, match="too little"):
        planned(offloaded=False, memory_bytes=2 * GB)
    assert max(planned(memory_bytes=2 * GB).first.memory_bytes) <= 2 * GB


def test_host_memory_is_a_limit_that_the_gpus_of_a_vm_share() -> None:
    enough = 2 * (2000 * MB + PINNED)
    assert planned(host_memory_bytes=enough, gpus_per_vm=2).first.host_bytes == (enough // 2,) * 2
    with pytest.raises(NoPlanError, match=r"needs [\d.]+ GiB of host memory but each worker has 2.98 GiB"):
        planned(host_memory_bytes=6400 * MB, gpus_per_vm=2)
    with pytest.raises(NoPlanError, match="of host memory"):
        planned(host_memory_bytes=6400 * MB, gpus_per_vm=2, memory_bytes=None)
    assert planned(offloaded=False, apart=False, host_memory_bytes=1 * MB).first.host_bytes == ()


def test_what_is_pinned_depends_on_the_replicas() -> None:
    """All of a stage's state is saved by one or two, and by each of more what it writes and would have to write."""
    figures = profile(calibrated(FOUR), 1)
    assert [pinned_bytes(figures, range(2), replicas) - STAGING_BYTES for replicas in (1, 2, 4)] == [
        600 * MB,
        600 * MB + 100 * MB,
        300 * MB + 100 * MB,
    ]


def test_ranks_with_another_wish_are_refused_by_name() -> None:
    assert first_difference("job", job(offloaded=True), job(offloaded=False)) == (
        "job.memory.offload_optimizer",
        True,
        False,
    )
