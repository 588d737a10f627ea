"""Samples that the loop changes are found, whatever way the change takes to dataset[i]; others are left alone."""

import multiprocessing
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from varuna import UsageError
from varuna.data.randomness import generator_lock
from varuna.data.samples import SampleSource
from varuna.job.handed_over.sample_watch import SampleWatch

Ways = Iterator[tuple[Callable[[], float], Callable[[], Any]]]


class Scaled:
    def __init__(self, scale: Callable[[], float], size: int = 8) -> None:
        self.scale, self.size, self.reads = scale, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        return {"x": torch.full((3,), 1.0 + index) * torch.tensor([1.0, 1.0 + self.scale(), 1.0]) + torch.rand(3)}


def file(folder: Path) -> Ways:
    found = folder / "level"
    found.write_text("0")
    yield lambda: float(found.read_text()), lambda: found.write_text("1")


def folder_listed(folder: Path) -> Ways:
    yield lambda: len(os.listdir(folder)), lambda: (folder / "new").touch()


def event(_: Path) -> Ways:
    found = multiprocessing.Event()
    yield lambda: float(found.is_set()), found.set


def a_queue(_: Path) -> Ways:
    found, last = queue.SimpleQueue[float](), [0.0]

    def newest() -> float:
        while not found.empty():
            last.append(found.get())
        return last[-1]

    yield newest, lambda: found.put(1.0)


def database(folder: Path) -> Ways:
    with sqlite3.connect(folder / "levels.db") as link:
        link.execute("create table levels (level real)")
        link.execute("insert into levels values (0)")
        link.commit()

        def change() -> None:
            link.execute("update levels set level = 1")
            link.commit()

        yield lambda: float(link.execute("select level from levels").fetchone()[0]), change


@pytest.mark.parametrize("way", [file, folder_listed, event, a_queue, database])
@pytest.mark.parametrize("is_collated", [False, True], ids=["dataset", "collate"])
def test_a_sample_that_the_loop_changes_is_found(
    way: Callable[[Path], Ways], is_collated: bool, tmp_path: Path
) -> None:
    for read, change in way(tmp_path):

        def collate(samples: list[Any], read: Callable[[], float] = read) -> dict[str, Tensor]:
            return {"x": default_collate(samples)["x"] * (1 + read())}

        options: dict[str, Any] = {"collate": collate} if is_collated else {}
        watch = SampleWatch(SampleSource(Scaled((lambda: 0.0) if is_collated else read), seed=0, **options))
        for _ in range(6):
            watch.check(None)
        change()
        with pytest.raises(UsageError, match=r"dataset\[\d\] became another sample: .*a file.*set_step\(step\)"):
            watch.check(None)


def test_a_sample_that_cannot_be_read_any_more_is_for_its_step_to_tell(tmp_path: Path) -> None:
    for read, _ in file(tmp_path):
        watch = SampleWatch(SampleSource(Scaled(read), seed=0))
        (tmp_path / "level").unlink()
        watch.check(None)


class Told(Scaled):
    def set_step(self, step: int) -> None:
        self.level = step


def test_a_dataset_that_is_told_the_step_is_not_read_again() -> None:
    data = Told(lambda: 0.0)
    SampleWatch(SampleSource(data, seed=0, step_at=lambda position: position)).check(None)
    assert data.reads == 0


def test_nobody_waits_long_for_a_sample_that_another_thread_reads() -> None:
    data = Scaled(lambda: 0.0)
    watch = SampleWatch(SampleSource(data, seed=0))
    before, done = data.reads, threading.Event()

    def check() -> None:
        watch.check(None)
        done.set()

    with generator_lock:
        threading.Thread(target=check, daemon=True).start()
        assert done.wait(60)
    assert data.reads == before
