"""Writes when the disk is full, and when it has a place again; names of damaged files."""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.fleet.manager.test_checkpoint_coordinator import record
from tests.unit.observe.recorded_events import recorded
from varuna.core.errors import FleetError
from varuna.core.messages import Vote
from varuna.fleet.run_folder.database import FILE
from varuna.fleet.run_folder.journal import RESERVE, RESERVE_BYTES, Journal
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.run_folder.step_log import StepLog
from varuna.fleet.state.run_events import Audited, GenerationStarted, Notice, StepRecorded, VerdictReached, WorkerLost

RECORD = record()
VERDICT = VerdictReached(generation=0, vote=Vote(generation=0, step=0, vector=(1.0,)), laggards=())
LONG = Notice(text="x" * 8000)  # no page has a place left for it


class Disk:
    """A journal whose disk can be full: SQLite itself says so when its file may not grow."""

    def __init__(self, folder: Path, json_log: Path | None = None, **more: int) -> None:
        self.said: list[str] = []
        self.slept = 0
        self.frees_after: int | None = None
        self.now_s = 0.0
        self.journal = Journal(folder, json_log, sleep=self.sleep, say=self.say, clock=lambda: self.now_s, **more)
        self.journal.begin_run("run")

    def say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("the room that was kept"):
            self.may_grow(10_000)

    def may_grow(self, pages: int) -> None:
        self.journal._database.execute(f"PRAGMA max_page_count={pages}")

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        if self.slept == self.frees_after:
            self.may_grow(10_000)


@contextmanager
def full(log: Path) -> Iterator[None]:
    """The disk of a log that this process has open is full."""
    links = {os.readlink(link): int(link.name) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    number = links[str(log)]
    kept = os.dup(number)
    with Path("/dev/full").open("ab") as disk:
        os.dup2(disk.fileno(), number)
    try:
        yield
    finally:
        if Path(f"/proc/self/fd/{number}").exists():  # the log was not closed meanwhile
            os.dup2(kept, number)
        os.close(kept)


def test_steps_wait_for_a_place_and_are_written_in_order(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.may_grow(1)
    for each in (LONG, recorded(0, 1.0), LONG, recorded(1, 0.5)):
        disk.journal.append(each)
    assert [text.split(" to ")[0] for text in disk.said] == ["the run's journal cannot be written"]
    assert "Is the disk full" in disk.said[0]
    assert disk.slept == 0  # nobody waits for a step's row
    disk.may_grow(10_000)
    disk.now_s = 1.0
    disk.journal.append(recorded(2, 0.25))
    assert disk.said[1:] == ["the run's journal can be written again"]
    disk.journal.close()
    assert read_events(tmp_path) == [LONG, recorded(0, 1.0), LONG, recorded(1, 0.5), recorded(2, 0.25)]


def test_what_waits_at_the_end_is_written_then(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.may_grow(1)
    disk.journal.append(LONG)
    disk.may_grow(10_000)
    disk.journal.close()
    assert read_events(tmp_path) == [LONG]


def test_a_full_disk_is_not_tried_with_every_step(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    asked: list[str] = []
    disk.may_grow(1)
    disk.journal._database.set_trace_callback(asked.append)
    for step in range(100):
        disk.now_s = step / 50
        disk.journal.append(LONG)
    assert sum(text.startswith("BEGIN") for text in asked) == 2


def test_what_no_longer_waits_for_a_place_is_counted(tmp_path: Path) -> None:
    disk = Disk(tmp_path, waiting_bytes=100_000)
    disk.may_grow(1)
    for _ in range(30):
        disk.journal.append(LONG)
    assert "what came first no longer waits" in disk.said[-1]
    assert len(disk.said) == 2
    disk.may_grow(10_000)
    disk.now_s = 1.0
    disk.journal.append(LONG)
    assert disk.said[2] == "the run's journal can be written again"
    kept = len(read_events(tmp_path))
    assert disk.said[3].startswith(f"{31 - kept} rows that had no place any more are missing")
    assert kept == 12


def test_a_decision_has_room_kept_for_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    reserve = tmp_path / RESERVE
    assert reserve.stat().st_size == RESERVE_BYTES
    disk.may_grow(1)
    disk.journal.append(LONG)
    assert reserve.exists()  # a step's row can wait
    disk.journal.append(VERDICT)
    assert disk.slept == 0
    assert read_events(tmp_path) == [LONG, VERDICT]
    assert reserve.exists()  # again: the disk is well
    disk.journal.close()
    assert not reserve.exists()


def test_a_decision_waits_for_the_disk_within_a_bound(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    (tmp_path / RESERVE).unlink()
    disk.frees_after = 5
    disk.may_grow(1)
    disk.journal.append(LONG)
    disk.journal.append(VERDICT)
    assert disk.slept == 5
    assert read_events(tmp_path) == [LONG, VERDICT]
    (tmp_path / RESERVE).unlink()
    disk.may_grow(1)
    disk.journal.append(LONG)
    with pytest.raises(
        FleetError, match=r"run\.db cannot be written \(.*full.*\), and decisions must be written before"
    ):
        disk.journal.append(VERDICT)
    assert disk.slept == 65


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_of_steps_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    disk = Disk(tmp_path, log)
    with full(log):
        disk.journal.append(recorded(0, 1.0))
        disk.journal.append(recorded(1, 0.5))
    assert len(disk.said) == 1
    assert disk.said[0].startswith(f"the log of steps cannot be written to {log} ([Errno 28]")
    disk.journal.append(recorded(2, 0.25))
    disk.journal.close()
    lines = log.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("damage", ["UPDATE events SET body = '{}'", "DELETE FROM facts WHERE name = 'first_event'"])
def test_a_damaged_journal_says_what_to_do(tmp_path: Path, damage: str) -> None:
    disk = Disk(tmp_path)
    disk.journal.append(LONG)
    disk.journal.close()
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute(damage)
    database.close()
    journal = Journal(tmp_path, None)
    with pytest.raises(
        FleetError, match=r"run\.db is damaged, or was written by another version.*Move run\.db\* out of the folder"
    ):
        journal.read()
    journal.close()


def test_broken_pages_are_damage_too(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for _ in range(20):
        disk.journal.append(LONG)
    disk.journal.close()
    content = bytearray((tmp_path / FILE).read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    (tmp_path / FILE).write_bytes(content)
    journal = Journal(tmp_path, None)
    with pytest.raises(FleetError, match="is damaged"):
        journal.read()
    journal.close()


def test_a_restart_reads_what_counts_however_long_the_run(tmp_path: Path) -> None:
    """The newest steps, the first of each generation, and all that is rare."""
    journal = Journal(tmp_path, None)
    assert journal.is_new
    journal.begin_run("run")
    assert not journal.is_new
    for generation in range(3):
        journal.append(Notice(text=f"before {generation}"))
        journal.append(GenerationStarted(record=RECORD.model_copy(update={"generation": generation})))
        for step in range(generation * 100, generation * 100 + 100):
            journal.append(recorded(step).model_copy(update={"generation": generation}))
            journal.append(Audited(action="look", address="here", allowed=True))
    journal.append(WorkerLost(worker="w1", rank=1, cause="it died"))
    past = journal.read(newest_steps=10)
    journal.close()
    assert past is not None
    steps = [event.step for event in past.events if isinstance(event, StepRecorded)]
    assert steps == [0, 100, 200, *range(290, 300)]
    kinds = [event.kind for event in past.events if not isinstance(event, StepRecorded)]
    assert kinds == ["notice", "generation_started"] * 3 + ["worker_lost"]
    assert len(read_events(tmp_path)) == 3 * 202 + 1  # nothing is forgotten


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_log_of_steps_has_no_gap_after_a_manager_that_died_while_its_disk_was_full(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0, "loss": 1.0, "generation": 0, "plan": "of a run before"}\n')
    first = Disk(tmp_path, log)
    for step in range(3):
        first.journal.append(recorded(step, 1.0 if step else float("nan")))
    with full(log):
        for step in range(3, 6):
            first.journal.append(recorded(step, 1.0))
    assert any("the log of steps cannot be written" in text for text in first.said)
    with log.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # half a line had a place
    first.journal._database.close()  # and here it is killed
    assert first.journal._steps is not None
    first.journal._steps._file.close()
    said: list[str] = []
    second = Journal(tmp_path, log, say=said.append)
    assert second.read() is not None
    second.append(recorded(6, 1.0))
    second.close()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert said == [f"3 steps that {log} lacked were added to it"]


@pytest.mark.parametrize(
    ("before", "after"), [("somebody's notes", "somebody's notes\n"), ('{"step": 3, "l', ""), ("", "")]
)
def test_a_log_of_somebody_elses_is_not_cut(tmp_path: Path, before: str, after: str) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(before)
    journal = Journal(tmp_path, log)
    journal.begin_run("run")
    journal.append(recorded(0, 1.0))
    journal.close()
    assert log.read_text().startswith(after + '{"step": 0')


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_lines_that_wait_for_a_place_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = StepLog(path, waiting_bytes=4000)
    with full(path):
        for step in range(100):
            assert log.append([(0.0, recorded(step, 1.0))]) is not None
    log.append([(0.0, recorded(100, 1.0))])
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert log.close() == 101 - len(steps)
    assert (steps[0], steps[-1], steps) == (0, 100, sorted(set(steps)))
    assert 2000 < path.stat().st_size < 5000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_steps_that_no_log_could_take_are_counted_at_the_end(tmp_path: Path) -> None:
    disk = Disk(tmp_path, tmp_path / "log.jsonl")
    with full(tmp_path / "log.jsonl"):
        disk.journal.append(recorded(0, 1.0))
        disk.journal.close()
    assert disk.said[-1].startswith("1 steps could not be written into")


def test_a_step_that_its_journal_could_not_take_is_in_the_log_once(tmp_path: Path) -> None:
    """The next manager hears of it from the workers again."""
    log = tmp_path / "log.jsonl"
    first = Disk(tmp_path, log)
    first.journal.append(recorded(0, 1.0))
    first.may_grow(1)
    first.journal.append(LONG)  # no page has a place left
    first.journal.append(recorded(1, 0.5))
    assert len(log.read_text().splitlines()) == 1
    first.journal._database.close()  # and here it is killed
    assert first.journal._steps is not None
    first.journal._steps._file.close()
    second = Journal(tmp_path, log)
    assert second.read() is not None
    for step in (1, 2):
        second.append(recorded(step, 0.5))
    second.close()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2]


def test_a_step_that_a_power_cut_took_from_the_journal_alone_is_in_the_log_once(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    first = Journal(tmp_path, log)
    first.begin_run("run")
    for step in range(4):
        first.append(recorded(step, 1.0))
    first._database.execute("DELETE FROM events WHERE id > 2")
    first.close()
    second = Journal(tmp_path, log)
    assert second.read() is not None
    for step in (2, 3, 4):
        second.append(recorded(step, 1.0))
    second.append(recorded(3, 1.0).model_copy(update={"generation": 1}))  # after a rollback
    second.close()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2, 3, 4, 3]
