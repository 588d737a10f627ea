"""Planned morphs with real workers: a slow one is left out, a node is drained; no step is lost, every loss is right."""

import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.launch import json_log, python
from tests.scenarios.play import Play
from tests.waiting import wait_for
from varuna.extras.doctor.sample_ledger import SampleLedger, audit
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import MorphRequested

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(120), pytest.mark.usefixtures("warm_start")]


def checked(folder: Path, job: tuple[str, ...], steps: int) -> SampleLedger:
    """Every step is logged once, with the loss of one process, and the ledger has no fault; the ledger."""
    expected = python(*job).losses
    rows = json_log(folder / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(steps))
    for row in rows:
        assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-5)
    ledger = audit(read_events(folder / "run"))
    assert ledger.faults == ()
    return ledger


def test_slow_workers_get_fewer_micro_batches_and_every_loss_is_right(tmp_path: Path) -> None:
    job = ("--steps", "30", "--dropout", "0.1", "--global-batch", "24", "--micro-batch", "1")
    config = FleetConfig(workers=4, replace=False, slow_ratio=1.5)
    slow = ("--compute", "0.08", "--slow-workers", "w2,w3")
    play = Play(tmp_path, *job, *slow, planner=lambda n: 1, config=config)
    try:
        play.trains(1)
        first = play.run.manager.fleet.record
        assert "worker w2 is slow" in first.cause or "worker w3 is slow" in first.cause

        def both_are_found() -> bool:  # maybe not at once
            record = play.run.manager.fleet.record
            return sum(speed < 1 for speed in record.plan.speeds) == 2 and set(record.grid[2:]) == {"w2", "w3"}

        wait_for(both_are_found, 60)
        newest = play.run.manager.fleet.record
        assert newest.plan.shares[1] > newest.plan.shares[2]
        assert newest.plan.workers == 4
        play.trains(newest.generation)
        killed = play.run.workers.pid(newest.grid[1])
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        play.trains(newest.generation + 1)
        last = play.run.manager.fleet.record.plan
        assert len(last.speeds) == 3
        assert last.shares[0] > last.shares[1]
    finally:
        play.finish()
    checked(tmp_path, job, 30)


def test_morph_after_morph_leaves_nothing_behind(tmp_path: Path) -> None:
    """A few dozen morphs in the same two processes; benchmarks/morph_leaks.py does 200."""
    turns = iter(range(10**6))
    play = Play(
        tmp_path,
        *("--steps", "100000", "--global-batch", "4"),
        planner=lambda n: 1 + next(turns) % 2,
        config=FleetConfig(workers=2, replace=False),
    )
    early: list[tuple[int, int]] = []

    def now() -> list[tuple[int, int]]:
        return [counts(play.run.workers.pid(name)) for name in ("w0", "w1")]

    def is_as_early() -> bool:
        return all(
            threads <= had_threads * 1.1 + 8 and descriptors <= had_descriptors * 1.1 + 12  # one old generation
            for (had_threads, had_descriptors), (threads, descriptors) in zip(early, now(), strict=True)
        )

    try:
        for generation in range(40):
            play.trains(generation)
            if generation == 15:
                early = now()
            if generation == 39:
                wait_for(is_as_early)  # old groups are let go by and by
            play.run.mailbox.post(MorphRequested())
    finally:
        play.run.stop("seen enough", 0)
        play.finish()


def counts(pid: int | None) -> tuple[int, int]:
    """Threads and descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir())), len(list(Path(f"/proc/{pid}/fd").iterdir()))
