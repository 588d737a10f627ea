"""Devices of two classes, whose workers really differ in speed: each gets what it can run, and losses are right."""

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.play import Play
from tests.scenarios.test_planned import checked
from tests.waiting import wait_for
from varuna.calibration.file import RUN_FILE, read_calibration
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.run_events import GenerationStarted
from varuna.planner.choose import planner

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("warm_start")]


def test_each_class_gets_what_it_can_run_and_keeps_its_seats(tmp_path: Path) -> None:
    job = ("--steps", "60", "--dropout", "0.1", "--global-batch", "24", "--micro-batch", "1")
    slow = ("--compute", "0.08", "--slow-workers", "w2,w3", "--by-class")
    calibrator = Calibrator(planner(memory_bytes=None, stages=1), run_dir=tmp_path / "run", cache=None)
    config = FleetConfig(workers=4, slow_ratio=1.5)
    play = Play(tmp_path, *job, *slow, planner=lambda n: 1, config=config, calibrator=calibrator)

    def by_class() -> dict[str, int]:
        plan = play.run.manager.fleet.record.plan
        shares = plan.shares
        return {cut.device_class: shares[replicas.start] for replicas, cut in plan.cuts}

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
        assert play.run.manager.fleet.slow == {}, "like is compared with like"
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
