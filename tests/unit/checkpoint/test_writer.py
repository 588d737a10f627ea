"""Saving goes on in the background, one save at a time, and says what went wrong."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from varuna.checkpoint import writer as writer_module
from varuna.checkpoint.shards import SectionState, read_shard, write_shard
from varuna.checkpoint.writer import BackgroundWriter
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard

WAIT_S = 20.0


class Desk:
    """What the writer reported."""

    def __init__(self, directory: Path) -> None:
        self.saved: list[SavedShard] = []
        self.errors: list[CheckpointError] = []
        self.writer = BackgroundWriter(directory, on_saved=self.saved.append, on_error=self.errors.append)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.writer.close(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "varuna-checkpoint"]


class Slow:
    """Stands in for ``write_shard`` and waits for a permit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered: queue.Queue[int] = queue.Queue()
        self.permits = threading.Semaphore(0)
        monkeypatch.setattr(writer_module, "write_shard", self)

    def __call__(self, directory: Path, step: int, generation: int, state: SectionState) -> SavedShard:
        self.entered.put(state.section)
        assert self.permits.acquire(timeout=WAIT_S)
        return write_shard(directory, step, generation, state)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(monkeypatch)


def states(*sections: int) -> list[SectionState]:
    return [SectionState(section, {"parameters/w": torch.full((3,), float(section))}) for section in sections]


def test_every_section_is_written_and_reported(desk: Desk, tmp_path: Path) -> None:
    assert desk.writer.submit(10, 1, states(2, 5))
    assert desk.writer.flush(WAIT_S)
    assert [(s.step, s.section) for s in desk.saved] == [(10, 2), (10, 5)]
    assert torch.equal(read_shard(tmp_path, desk.saved[1]).tensors["parameters/w"], torch.full((3,), 5.0))
    assert desk.errors == []


def test_a_save_is_skipped_while_the_previous_one_runs(slow: Slow, desk: Desk) -> None:
    assert desk.writer.submit(10, 1, states(0))
    slow.entered.get(timeout=WAIT_S)
    assert not desk.writer.submit(20, 1, states(0))
    assert not desk.writer.flush(timeout_s=0.01)
    slow.permits.release(2)
    assert desk.writer.flush(WAIT_S)
    assert desk.writer.submit(30, 1, states(0))
    assert desk.writer.flush(WAIT_S)
    assert [s.step for s in desk.saved] == [10, 30]


def test_an_error_ends_the_save_and_the_next_one_is_tried(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000010"
    folder.touch()  # in the way
    assert desk.writer.submit(10, 1, states(0, 1))
    assert desk.writer.flush(WAIT_S)
    [error] = desk.errors
    assert "section-000.g1.safetensors" in str(error)
    folder.unlink()
    assert desk.writer.submit(10, 1, states(0, 1))
    assert desk.writer.flush(WAIT_S)
    assert [s.section for s in desk.saved] == [0, 1]


def test_an_error_that_nobody_foresaw_is_reported_too(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> SavedShard:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(writer_module, "write_shard", broken)
    assert desk.writer.submit(10, 1, states(4))
    assert desk.writer.flush(WAIT_S)
    [error] = desk.errors
    assert "section 4 of step 10 was not saved: RuntimeError('CUDA error" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_closing_lets_the_save_in_progress_finish_and_takes_no_more(slow: Slow, desk: Desk) -> None:
    assert desk.writer.submit(10, 1, states(0, 1))
    slow.entered.get(timeout=WAIT_S)
    desk.writer.close(timeout_s=0.01)  # bounded although the disk hangs
    assert not desk.writer.submit(20, 1, states(0))
    slow.permits.release(2)
    desk.writer.close(WAIT_S)
    assert [s.section for s in desk.saved] == [0, 1]


def test_flushing_an_idle_writer_returns_at_once(desk: Desk) -> None:
    assert desk.writer.flush(0)
