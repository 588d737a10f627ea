"""Processes read the same samples as a thread, in the same order, and none outlives who started it."""

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.unit.data.test_loader import WAIT_S, Deliveries
from varuna.core.errors import DataError
from varuna.data.loader import Loader
from varuna.data.micro_batch import MicroBatch
from varuna.data.samples import SampleSource


class Odd(Exception):
    """Cannot be made from its pickled arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


class Drawn(Dataset[Any]):
    """Draws from all three libraries; some indices fail, each in its own way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 100:
            raise ValueError("no such sample")
        if index == 101:
            raise Odd(1, 2)
        if index == 102:
            raise SystemExit("the dataset gave up")
        if index == 103:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 104:  # until somebody allows it
            (self.folder / f"reads-{os.getpid()}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {
            "x": torch.tensor(noise),
            "big": torch.full((300_000,), float(index)),
            "half": torch.zeros(2).bfloat16(),
        }


def test_micro_batches_of_processes_are_those_of_a_thread(tmp_path: Path) -> None:
    def read(processes: int) -> list[Any]:
        deliveries, source = Deliveries(), SampleSource(Drawn(tmp_path), seed=3, processes=processes)
        loader = Loader(source, deliver=deliveries.deliver, lookahead=2)
        loader.request(0, [(j, [2 * j, 2 * j + 1]) for j in range(5)])
        loader.request(1, [(j, [50 + j]) for j in range(4)], ["x", "half"])
        found = []
        for _ in range(9):
            found.append(deliveries.next())
            loader.taken()
        loader.close(WAIT_S)
        source.close()
        return found

    for (step, number, mine), (*place, its) in zip(read(0), read(3), strict=True):
        assert place == [step, number]
        assert (mine.indices, mine.digests) == (its.indices, its.digests)
        assert list(mine.tensors) == list(its.tensors)
        assert all(torch.equal(mine.tensors[key], its.tensors[key]) for key in mine.tensors)


@pytest.fixture
def deliveries() -> Deliveries:
    return Deliveries()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SampleSource]:
    source = SampleSource(Drawn(tmp_path), seed=0, processes=2)
    yield source
    source.close()


def test_what_a_dataset_raises_comes_in_place_of_the_batch_with_the_process(
    source: SampleSource, deliveries: Deliveries
) -> None:
    loader = Loader(source, deliver=deliveries.deliver)
    loader.request(0, [(0, [100]), (1, [101]), (2, [102]), (3, [7])])
    plain, odd, gone, good = (deliveries.next()[2] for _ in range(4))
    assert isinstance(plain, ValueError)
    assert "dataset[100]" in plain.__notes__[0]
    assert "in reader 1 of 2 (process " in plain.__notes__[1]
    assert "ValueError: no such sample" in plain.__notes__[1]
    assert isinstance(odd, DataError)
    assert "Odd: odd" in str(odd)
    assert isinstance(gone, SystemExit)
    assert good.indices == (7,)
    loader.close(WAIT_S)


def test_a_process_that_dies_is_named_and_nothing_hangs(source: SampleSource, deliveries: Deliveries) -> None:
    loader = Loader(source, deliver=deliveries.deliver)
    loader.request(0, [(0, [1]), (1, [103]), (2, [2]), (3, [3]), (4, [4])])
    assert deliveries.next()[2].indices == (1,)
    dead = deliveries.next()[2]
    assert isinstance(dead, DataError)
    assert "reader 2 of 2 (process " in str(dead)
    assert "killed by SIGKILL. It was reading positions [103] of the run. The machine may be out of memory" in str(dead)
    assert isinstance(dead.__cause__, MemoryError)
    loader.taken()
    loader.taken()
    assert deliveries.next()[2].indices == (2,)
    assert all(isinstance(deliveries.next()[2], DataError | MicroBatch) for _ in range(2))
    loader.close(WAIT_S)


def test_the_next_loader_gets_its_own_samples_though_old_ones_are_being_read(
    source: SampleSource, deliveries: Deliveries, tmp_path: Path
) -> None:
    old = Loader(source, deliver=deliveries.deliver)
    old.request(0, [(0, [104]), (1, [8]), (2, [9])])
    while not list(tmp_path.glob("reads-*")):
        time.sleep(0.01)
    old.close(timeout_s=0.0)
    new = Loader(source, deliver=deliveries.deliver)
    new.request(1, [(j, [20 + j]) for j in range(3)])
    (tmp_path / "go").touch()
    found = [deliveries.next() for _ in range(3)]
    assert [(step, batch.indices) for step, _, batch in found] == [(1, (20,)), (1, (21,)), (1, (22,))]
    assert deliveries.arrived.empty()
    new.close(WAIT_S)


def test_a_process_lets_go_of_the_sockets_of_its_parent(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    source = SampleSource(Drawn(tmp_path), seed=0, processes=1)
    source.reading()
    one.close()
    other.settimeout(WAIT_S)
    assert other.recv(1) == b"", "closed, though the process still lives"
    other.close()
    source.close()


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the end of children")
def test_no_process_is_left_after_a_kill(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import multiprocessing, pathlib, time
        from tests.unit.data.test_readers import Drawn
        from varuna.data.readers import SampleRequest
        from varuna.data.samples import SampleSource
        source = SampleSource(Drawn(pathlib.Path({str(tmp_path)!r})), seed=0, processes=2)
        readers = source.reading()
        readers.submit(SampleRequest((104,), None))
        print(*(each.pid for each in multiprocessing.active_children()), flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(each) for each in parent.stdout.readline().split()]
    assert len(pids) == 2
    while not list(tmp_path.glob("reads-*")):  # one is stuck in dataset[i]
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline_s = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text() for pid in pids):
        assert time.monotonic() < deadline_s, "a process outlives its parent"
        time.sleep(0.01)


def test_collate_runs_in_the_process_too(deliveries: Deliveries, tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {"pid": torch.full((len(samples),), os.getpid())}

    source = SampleSource(Drawn(tmp_path), seed=0, collate=collate, processes=1)
    loader = Loader(source, deliver=deliveries.deliver)
    loader.request(0, [(0, [1, 2])])
    assert deliveries.next()[2].tensors["pid"].tolist() != [os.getpid()] * 2
    loader.close(WAIT_S)
    source.close()
