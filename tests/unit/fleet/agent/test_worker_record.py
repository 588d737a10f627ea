"""An agent's memory of workers, and logs on their way."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fleet.support import make_job, make_plan, make_vote
from varuna.core.messages import (
    MAX_FRAME_BYTES,
    Assign,
    Assignment,
    Beat,
    Hello,
    Leaving,
    Recorded,
    Saved,
    StopReport,
    Suspect,
    Vote,
    Voted,
)
from varuna.core.saved import SavedShard
from varuna.core.times import RankTimes
from varuna.core.vote import VoteLayout
from varuna.fleet.agent.log_forwarder import LogForwarder
from varuna.fleet.agent.worker_record import WorkerRecord
from varuna.fleet.net.protocol import Greet, JobIdentity, Output
from varuna.fleet.run_folder.log_room import LogRoom, Usage
from varuna.fleet.run_folder.worker_logs import LogKeeper

PLAN = make_plan(make_job(), 2, None)
HELLO = Hello(worker="n0.0", pid=1, version="1", job=make_job())


def assign(generation: int, *, fresh: bool = False) -> Assign:
    return Assign(
        assignment=Assignment(
            generation=generation,
            plan=PLAN,
            rank=0,
            members=2,
            next_step=0,
            fresh=fresh,
        )
    )


def record() -> WorkerRecord:
    record = WorkerRecord("n0.0")
    record.note_from_worker(HELLO)
    return record


def test_the_end_of_a_training_is_said_again_until_the_next_one_has_begun() -> None:
    w = record()
    w.note_from_manager(assign(0, fresh=True))
    vote, leaving = Voted(vote=make_vote(PLAN, 0, 9)), Leaving(step=10)
    w.note_from_worker(vote)
    w.note_from_worker(leaving)
    second = HELLO.model_copy(update={"training": 1})
    w.note_from_worker(second)
    assert w.snapshot().said == (HELLO, vote, leaving, second)
    w.note_from_manager(assign(1, fresh=True))
    assert w.snapshot().said == (second,)


def test_what_nobody_has_recorded_is_said_again_and_nothing_else() -> None:
    w = record()
    w.note_from_manager(assign(0, fresh=True))
    votes = [Voted(vote=make_vote(PLAN, 0, step)) for step in range(5)]
    for vote in votes:
        w.note_from_worker(vote)
    w.note_from_manager(Recorded(step=2))
    assert w.snapshot().said == (HELLO, *votes[3:])
    assert w.snapshot().generation == 0


@pytest.mark.nightly
def test_a_greeting_after_a_long_absence_fits_into_a_frame() -> None:
    """Thousands of steps of thousands of micro-batches: all but the newest vote are totals."""
    plan = PLAN.model_copy(update={"global_batch": 2 * 8192})
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches)
    vector = tuple(1.0 / (1 + place) for place in range(layout.size))
    w, tally = record(), layout.tally(vector)
    for step in range(4000):
        w.note_from_worker(Voted(vote=Vote(generation=0, step=step, vector=vector, tally=tally)))
    said = [message.vote for message in w.snapshot().said if isinstance(message, Voted)]
    assert [vote.step for vote in said] == list(range(4000))
    assert [vote.is_whole for vote in said] == [False] * 3999 + [True]
    greet = Greet(session="s", job=JobIdentity(version="1", script="s", script_sha256="", args_sha256=""))
    size_bytes = len(greet.model_copy(update={"snapshots": (w.snapshot(),)}).model_dump_json())
    assert size_bytes < MAX_FRAME_BYTES / 20


def test_standing_still_is_remembered_until_there_is_a_new_part() -> None:
    w = record()
    w.note_from_manager(assign(0))
    suspect, held = Suspect(generation=0, reason="a link broke"), StopReport(generation=0, next_step=1)
    w.note_from_worker(suspect)
    assert w.snapshot().said == (HELLO, suspect)
    w.note_from_worker(held)
    assert w.snapshot().said == (HELLO, held)
    w.note_from_manager(assign(1))
    assert (w.snapshot().said, w.snapshot().generation) == ((HELLO,), 1)
    w.note_from_worker(Leaving(step=9))
    assert w.snapshot().said[-1] == Leaving(step=9)


def saved(step: int, section: int) -> Saved:
    return Saved(shard=SavedShard(step=step, generation=0, section=section, file=f"{step}/{section}", size_bytes=1))


def test_shards_of_the_newest_checkpoints_are_said_again_until_a_rollback() -> None:
    w = record()
    said = [saved(step, section) for step in (10, 20, 30) for section in (0, 1)]
    for shard in said:
        w.note_from_worker(shard)
    assert w.snapshot().said == (HELLO, *said[2:])
    w.note_from_manager(assign(1))
    assert w.snapshot().said == (HELLO, *said[2:])
    w.note_from_manager(assign(2, fresh=True))
    assert w.snapshot().said == (HELLO,)


def test_a_beat_is_passed_on_once_so_that_silence_looks_like_silence() -> None:
    w = record()
    w.note_from_worker(Beat(generation=0, step=1, activity=""))
    w.note_from_worker(Beat(generation=0, step=2, activity=""))
    beat = w.take_beat()
    assert beat is not None
    assert beat.step == 2
    assert w.take_beat() is None


def test_what_steps_took_is_not_lost_between_two_pulses() -> None:
    w = record()
    times = RankTimes(steps=2, step_s=1.0, waited_s=0.0, reduced_s=0.0, actions={})
    w.note_from_worker(Beat(generation=0, step=1, activity="", times=times, forward_s=1.0, backward_s=2.0))
    w.note_from_worker(
        Beat(generation=0, step=2, activity="", times=times.model_copy(update={"steps": 6, "step_s": 5.0}))
    )
    w.note_from_worker(Beat(generation=0, step=3, activity="newest"))
    beat = w.take_beat()
    assert beat is not None
    assert beat.times is not None
    assert (beat.activity, beat.forward_s, beat.times.steps, beat.times.step_s) == ("newest", 1.0, 8, 4.0)
    w.note_from_worker(Beat(generation=0, step=3, activity="", times=times))
    w.note_from_worker(Beat(generation=1, step=3, activity=""))  # of another generation: nothing is carried over
    assert w.take_beat() == Beat(generation=1, step=3, activity="")


def test_logs_arrive_whole_over_windows_restarts_and_repetitions(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    content = bytes(range(256)) * 2
    (here / "n0.0.log").write_bytes(content[:300])
    forwarder, keeper = LogForwarder(here, window_bytes=25, chunk_bytes=10), LogKeeper(there)
    forwarder.begin(1, keeper.sizes("n0"))
    first = forwarder.next_outputs()
    assert sum(len(output.data) for output in first) == 30  # no more than a window, in whole chunks
    assert forwarder.next_outputs() == []
    keeper.write(first[0])
    forwarder.begin(2, keeper.sizes("n0"))  # the manager was away: what was under way counts for nothing
    (here / "n0.0.log").write_bytes(content)
    while taken := forwarder.next_outputs():
        for output in taken:
            keeper.write(Output.model_validate_json(output.model_dump_json()))
            keeper.write(output)  # said twice
        forwarder.confirmed(taken)
    assert keeper.wait_until_written()
    assert (there / "n0.0.log").read_bytes() == content


def test_a_log_that_is_truncated_or_removed_on_either_side_costs_nobody_anything(tmp_path: Path) -> None:
    """As logrotate's copytruncate does, or ``: > file``."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    forwarder, keeper = LogForwarder(here), LogKeeper(there)
    forwarder.begin(1, keeper.sizes("n0"))

    def forward() -> None:
        for output in forwarder.next_outputs():
            keeper.write(output)
            forwarder.confirmed([output])
        assert keeper.wait_until_written()

    log, kept = here / "n0.0.log", there / "n0.0.log"
    log.write_bytes(b"one\n")
    forward()
    kept.write_bytes(b"")
    log.write_bytes(b"one\ntwo\n")
    forward()
    assert kept.read_bytes() == b"two\n"
    log.write_bytes(b"x\n")
    forward()
    kept.unlink()
    log.write_bytes(b"x\nyy\n")
    forward()
    assert kept.read_bytes() == b"yy\n"
    assert keeper.sizes("n0") == {"n0.0": 13}
    keeper.write(Output(worker="n0.0", offset=900, data=b"late"))
    assert keeper.wait_until_written()
    assert kept.read_bytes() == b"yy\n\n[varuna: 887 bytes are missing here]\nlate"
    log.unlink()
    forward()


def test_a_slow_disk_holds_nobody_up_and_what_it_does_not_take_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "n0.0.log")  # nobody reads: whoever opens it waits
    keeper = LogKeeper(tmp_path, waiting_bytes=20)
    for offset in range(0, 50, 10):
        keeper.write(Output(worker="n0.0", offset=offset, data=b"012345678\n"))
    assert not keeper.wait_until_written(0.0)
    with (tmp_path / "n0.0.log").open("rb", buffering=0) as slow:
        assert keeper.wait_until_written()
        keeper.write(Output(worker="n0.0", offset=50, data=b"end"))
        assert keeper.wait_until_written()
        assert slow.read(1000) == b"012345678\n" * 2 + b"\n[varuna: 30 bytes are missing here]\nend"


def test_a_worker_that_writes_without_end_does_not_fill_the_managers_disk(tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path, most_bytes=15)
    for offset in range(0, 100, 10):
        keeper.write(Output(worker="n0.0", offset=offset, data=b"0123456789"))
    assert keeper.wait_until_written()
    assert (tmp_path / "n0.0.log").stat().st_size == 15


def test_all_logs_together_have_a_bound_and_removing_some_makes_room(tmp_path: Path) -> None:
    now = [0.0]
    room = LogRoom(tmp_path, most_bytes=25, clock=lambda: now[0])
    keeper = LogKeeper(tmp_path, lambda: now[0], room=room)

    def write(worker: str, offset: int = 0) -> None:
        keeper.write(Output(worker=worker, offset=offset, data=b"0123456789"))
        assert keeper.wait_until_written()

    for worker in ("n0.0", "n0.1", "n1.0"):
        write(worker)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.log")) == 20
    (tmp_path / "n0.0.log").unlink()
    now[0] = 60.0
    write("n1.0", 10)
    assert not (tmp_path / "n1.0.log").exists()  # the mark of what is missing needs room, too
    (tmp_path / "n0.1.log").unlink()
    now[0] = 120.0
    write("n2.0")
    assert (tmp_path / "n2.0.log").read_bytes() == b"0123456789"


@pytest.mark.parametrize(
    ("total", "left"), [(100 * 2**20, 10 * 2**20), (100 * 2**30, 256 * 2**20)], ids=["small", "large"]
)
def test_logs_leave_a_share_of_their_disk_to_the_run(tmp_path: Path, total: int, left: int) -> None:
    free = [left + 10]
    room = LogRoom(tmp_path, usage=lambda folder: Usage(total, total - free[0], free[0]))
    assert room.take_room(10) == ""
    free[0] = left + 9
    assert "is not for logs" in room.take_room(10)
    keeper = LogKeeper(tmp_path, room=room)
    keeper.write(Output(worker="n0.0", offset=0, data=b"0123456789"))
    assert keeper.wait_until_written()
    assert not (tmp_path / "n0.0.log").exists()


def test_names_that_nobody_runs_out_of_do_not_fill_the_managers_folder(tmp_path: Path) -> None:
    keeper = LogKeeper(tmp_path, most_logs=3)
    for number in range(10):
        keeper.begin_log(f"n0.{number}")
        keeper.write(Output(worker=f"n0.{number}", offset=0, data=b"x"))
    assert keeper.wait_until_written()
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["n0.0.log", "n0.1.log", "n0.2.log"]


@pytest.mark.parametrize(("number", "pause_s"), [(errno.EMFILE, 1.0), (errno.ENOSPC, 60.0)])
def test_a_moment_without_descriptors_costs_a_log_a_moment_and_a_full_disk_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, pause_s: float
) -> None:
    now = [100.0]
    keeper = LogKeeper(tmp_path, lambda: now[0])
    real, fails = os.open, [True]

    def opener(path: str, *how: Any, **more: Any) -> int:
        if str(path).endswith("n0.0.log"):
            if fails.pop():
                raise OSError(number, "no")
            fails.append(False)
        return real(path, *how, **more)

    monkeypatch.setattr(os, "open", opener)
    keeper.write(Output(worker="n0.0", offset=0, data=b"lost "))
    assert keeper.wait_until_written()
    fails.append(False)
    now[0] += pause_s - 0.1
    keeper.write(Output(worker="n0.0", offset=5, data=b"lost too "))
    assert keeper.wait_until_written()
    now[0] += 0.2
    keeper.write(Output(worker="n0.0", offset=14, data=b"kept"))
    assert keeper.wait_until_written()
    assert (tmp_path / "n0.0.log").read_bytes() == b"\n[varuna: 14 bytes are missing here]\nkept"
