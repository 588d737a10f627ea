"""Devices of two classes, whose workers really differ in speed: each gets what it can run, and losses are right."""

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.launch import json_log, python
from tests.scenarios.play import Play
from tests.scenarios.test_planned import checked
from tests.waiting import wait_for
from varuna.calibration.file import RUN_FILE, read_calibration
from varuna.calibration.format import Calibrations
from varuna.core.devices import WorkerGroups
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.run_events import GenerationStarted
from varuna.planner.choose import plan_run, planner, run_request
from varuna.planner.spanning import spanning

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(180), pytest.mark.usefixtures("warm_start")]


def test_each_class_gets_what_it_can_run_and_keeps_its_seats(tmp_path: Path) -> None:
    job = ("--steps", "60", "--dropout", "0.1", "--global-batch", "24", "--micro-batch", "1")
    slow = ("--compute", "0.08", "--slow-class", "w2,w3")
    calibrator = Calibrator(planner(memory_bytes=None, stages=1), run_dir=tmp_path / "run", cache=None)
    config = FleetConfig(workers=4, slow_ratio=1.5)
    play = Play(tmp_path, *job, *slow, planner=lambda n: 1, config=config, calibrator=calibrator)

    def by_class() -> dict[str, int]:
        plan = play.run.manager.fleet.record.plan
        shares = plan.shares
        return {cut.device_class: shares[replicas.start] for replicas, cut in plan.kinds}

    def seats() -> dict[str, list[str]]:
        record = play.run.manager.fleet.record
        found: dict[str, list[str]] = {}
        for rank, name in enumerate(record.grid):
            found.setdefault(record.plan.class_of(rank), []).append(name)
        return found

    try:
        play.trains(0)
        assert set(by_class()) == {"fast", "slow"}
        assert max(by_class().values()) - min(by_class().values()) <= 1, "nothing is known of their speed"
        wait_for(lambda: by_class().get("fast", 0) >= by_class().get("slow", 0) + 3, 60)
        newest = play.run.manager.fleet.generation
        assert {name: sorted(members) for name, members in seats().items()} == {
            "fast": ["w0", "w1"],
            "slow": ["w2", "w3"],
        }
        assert play.run.manager.fleet.speeds.slow == {}, "like is compared with like"
        for victim in ("w1", "w2"):  # what replaces them is fast
            pid = play.run.workers.pid(victim)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            play.trains(newest + 1)
            newest = play.run.manager.fleet.generation
        wait_for(lambda: len(seats().get("fast", ())) == 3, 60)
        assert seats()["slow"] == ["w3"]
    finally:
        play.finish()
    assert play.of(GenerationStarted)[-1].record.plan.workers == 4
    fast, slowly = (read_calibration(tmp_path / "run" / RUN_FILE).of(name).compute_s(1) for name in ("fast", "slow"))
    assert 1.5 < slowly / fast < 2.5
    checked(tmp_path, job, 60)


def test_a_slow_worker_of_a_class_gets_fewer_micro_batches_than_its_peers(tmp_path: Path) -> None:
    # Speeds are 4, 4, 2, 2 and 1: with 39 the slowest saves every seventh second; with 30 steps are as long without it.
    job = ("--steps", "40", "--dropout", "0.1", "--global-batch", "39", "--micro-batch", "1")
    slow = ("--compute", "0.05", "--slow-class", "w2,w3,w4", "--slow-workers", "w4")
    calibrator = Calibrator(planner(memory_bytes=None, stages=1), run_dir=tmp_path / "run", cache=None)
    config = FleetConfig(workers=5, slow_ratio=1.5, replace=False)
    play = Play(tmp_path, *job, *slow, planner=lambda n: 1, config=config, calibrator=calibrator)

    def is_dealt() -> bool:
        record = play.run.manager.fleet.record
        by_class = {cut.device_class: [record.plan.speed_of(each) for each in them] for them, cut in record.plan.kinds}
        fast, slow = by_class.get("fast", []), by_class.get("slow", [])
        return (fast, slow[:-1]) == ([1.0, 1.0], [1.0, 1.0]) and slow[-1] < 1

    def share_of(name: str) -> int:
        record = play.run.manager.fleet.record
        return record.plan.shares[record.grid.index(name)]

    try:
        play.trains(0)
        wait_for(lambda: is_dealt() and share_of("w0") > share_of("w2") > share_of("w4"), 90)
        assert list(play.run.manager.fleet.speeds.slow) == ["w4"]
        newest = play.run.manager.fleet.generation
        for victim in ("w4", "w0"):
            pid = play.run.workers.pid(victim)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            play.trains(newest + 1)
            newest = play.run.manager.fleet.generation
        assert play.run.manager.fleet.record.plan.classes == {"fast": 1, "slow": 2}
        assert play.run.manager.fleet.record.plan.speeds == ()
    finally:
        play.finish()
    checked(tmp_path, job, 40)


def test_one_pipeline_runs_on_several_classes_and_loses_and_gets_workers(tmp_path: Path) -> None:
    job = ("--steps", "60", "--dropout", "0.1", "--global-batch", "12", "--micro-batch", "1", "--layers", "4")
    slow = ("--compute", "0.005", "--slow-class", "w1,w2")

    def over_both(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        request = run_request(job, workers=workers, micro_batch=micro_batch, calibrations=known)
        if len(request.classes) > 1 and (found := spanning(request, [1])):
            return found[0].plan
        return plan_run(job, workers=workers, micro_batch=micro_batch, calibrations=known)

    calibrator = Calibrator(over_both, run_dir=tmp_path / "run", cache=None)
    config = FleetConfig(workers=3, slow_ratio=1.5)
    saved = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2")
    play = Play(tmp_path, *job, *slow, *saved, planner=lambda n: 1, config=config, calibrator=calibrator)

    def is_over_both() -> bool:
        record = play.run.manager.fleet.record
        workers = play.run.manager.fleet.workers
        sits = all(
            name not in workers or workers[name].device_class == record.plan.class_of(rank)
            for rank, name in enumerate(record.grid)
        )
        return set(record.plan.first.stage_classes) == {"fast", "slow"} and sits

    try:
        play.trains(0)
        wait_for(is_over_both, 60)
        assert play.run.manager.fleet.record.plan.stages == 3
        newest = play.run.manager.fleet.generation
        for victim in ("w1", "w0"):  # what replaces them is fast
            pid = play.run.workers.pid(victim)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            play.trains(newest + 1)
            wait_for(is_over_both, 60)
            newest = play.run.manager.fleet.generation
        assert play.run.manager.fleet.speeds.slow == {}, "stages of one pipeline differ as their classes do"
    finally:
        play.finish()
    expected, rows = python(*job).losses, json_log(tmp_path / "log.jsonl")
    assert {row["step"] for row in rows} == set(range(60))
    for row in rows:
        assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-5)
