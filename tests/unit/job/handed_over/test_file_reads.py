"""Files that captured code reads are watched; those of constructors, datasets and libraries are not."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from varuna.job.handed_over.file_reads import FileReads


def opened(path: Path) -> str:
    with open(path) as file:
        return file.read()


def opened_by_its_number(path: Path) -> bytes:
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 9)
    finally:
        os.close(number)


WAYS: dict[str, Callable[[Path], Any]] = {
    "open": opened,
    "os": opened_by_its_number,
    "pathlib": lambda path: path.read_text(),
    "numpy": lambda path: np.loadtxt(path),
    "torch": lambda path: torch.load(f"{path}.pt", weights_only=True),
}


class Reading(nn.Module):
    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        super().__init__()
        self.path, self.read = path, read
        Path(f"{path}.json").read_text()

    def forward(self) -> Any:
        return self.read(self.path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_text("1")
    Path(f"{found}.json").write_text("1")
    torch.save(torch.ones(1), f"{found}.pt")
    return found


def changed_after(reads: FileReads, work: Callable[[], object], *files: str) -> str:
    """Have captured code run, then change files; the name of one that was read."""
    with reads.noted():
        work()
    assert reads.changed() is None
    for file in files:
        Path(file).write_text("2")
    found = reads.changed()
    return "" if found is None else os.path.basename(found.path)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_forward_reads_is_found_when_it_changes(path: Path, way: str) -> None:
    model = Reading(path, WAYS[way])
    assert changed_after(FileReads([]), model, f"{path}.pt", str(path)) == ("file.pt" if way == "torch" else "file")


def test_a_loss_is_known_by_its_code_and_may_be_a_partial(path: Path) -> None:
    def loss(factor: float, where: Path) -> float:
        return factor * float(where.read_text())

    given = partial(loss, 2.0)
    assert changed_after(FileReads([given]), lambda: given(path), str(path)) == "file"
    assert changed_after(FileReads([]), lambda: given(path), str(path)) == ""


def test_what_builds_the_model_may_read_a_file_that_changes(path: Path) -> None:
    assert changed_after(FileReads([]), lambda: Reading(path, WAYS["open"]), f"{path}.json", str(path)) == ""


def test_a_file_that_is_written_is_not_watched(path: Path) -> None:
    assert changed_after(FileReads([]), Reading(path, lambda where: where.write_text("1")), str(path)) == ""


def test_a_file_written_anew_with_the_same_contents_is_as_it_was_and_a_missing_one_is_not(path: Path) -> None:
    reads = FileReads([])
    with reads.noted():
        Reading(path, WAYS["open"])()
    path.unlink()
    path.write_text("1")
    assert reads.changed() is None
    path.unlink()
    assert reads.changed() is not None


def test_what_forward_reads_of_a_pipe_is_not_taken_from_it(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    both = os.open(path, os.O_RDWR)  # another end, for which opening it waits
    try:
        os.write(both, b"1")
        with FileReads([]).noted():
            assert Reading(path, opened_by_its_number)() == b"1"
    finally:
        os.close(both)


def test_nothing_is_noted_after_the_block(path: Path) -> None:
    reads = FileReads([])
    with reads.noted():
        pass
    Reading(path, WAYS["open"])()
    path.write_text("2")
    assert reads.changed() is None
