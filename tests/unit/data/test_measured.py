"""Without ``num_workers=`` a thread reads, and processes once training waits; no sample shows the difference."""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import varuna.data.measured
from tests.depth import nightly_rows
from tests.unit.data.test_loader import WAIT_S, Deliveries
from tests.unit.data.test_readers import Drawn
from varuna.data.handles import unshareable
from varuna.data.loader import Loader
from varuna.data.measured import MeasuredReading
from varuna.data.pace import MOST, Pace
from varuna.data.samples import SampleSource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are started unasked on Linux only")
BATCHES = 12


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide after three micro-batches, and take every sample for a slow one; training seems to wait."""
    for name, value in {"WHILE_S": 0.0, "SEVERAL": 3, "FEW": 3, "QUICK_S": 0.0}.items():
        monkeypatch.setattr(varuna.data.measured, name, value)
    seems(monkeypatch, waited_s=0.05)


def seems(monkeypatch: pytest.MonkeyPatch, **changed: float) -> None:
    """Whatever training does, this is what is seen of reading."""
    monkeypatch.setattr(varuna.data.measured.ReadingWatch, "pace", lambda _watch, _waited_s: pace(**changed))


class Told(Drawn):
    """Says who read it, beside the samples: that differs and is no part of them."""

    def __init__(self, folder: Path, **held: Any) -> None:
        super().__init__(folder)
        self.held = held

    def __getitem__(self, index: int) -> dict[str, Any]:
        with (self.folder / "readers").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().__getitem__(index)


class Private(Told):
    """Can be read in the process only that made it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pid = os.getpid()

    def __getitem__(self, index: int) -> dict[str, Any]:
        if os.getpid() != self.pid:
            raise RuntimeError("not here")
        return super().__getitem__(index)


class Different(Told):
    """Depends on the process."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"pid": torch.tensor(os.getpid())}


class SlowAtFirst(Told):
    """Opens something, or imports, when the first sample is read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not (self.folder / "readers").exists():
            time.sleep(0.2)
        return super().__getitem__(index)


class Later(Told):
    """Kills the process that reads sample 110."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pid = os.getpid()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(103 if index == 110 and os.getpid() != self.pid else index)


@pytest.fixture
def sources() -> Iterator[list[SampleSource]]:
    opened: list[SampleSource] = []
    yield opened
    for source in opened:
        source.close()


def read(source: SampleSource) -> list[Any]:
    """Samples 0 to 10, and then 110."""
    deliveries = Deliveries()
    loader = Loader(source, deliver=deliveries.deliver, lookahead=1)
    loader.request(0, [(j, [j]) for j in range(BATCHES - 1)])
    loader.request(1, [(0, [110])])
    found = []
    for _ in range(BATCHES):
        found.append(deliveries.next()[2])
        loader.taken()
    loader.close(WAIT_S)
    return found


def same(one: Any, other: Any) -> bool:
    return one.indices == other.indices and all(
        torch.equal(one.tensors[key], other.tensors[key]) for key in other.tensors
    )


def test_processes_read_once_training_waits_and_no_bit_changes(
    tmp_path: Path, sources: list[SampleSource], capfd: pytest.CaptureFixture[str]
) -> None:
    sources.append(source := SampleSource(Told(tmp_path), seed=3, processes=None))
    source.prepare()
    found = read(source)
    pids = (tmp_path / "readers").read_text().split()
    assert pids[0] == str(os.getpid())
    assert len(set(pids[-6:])) > 1
    assert str(os.getpid()) not in pids[-6:]
    assert "6 processes read them from now on. num_workers=6 does so from the start" in capfd.readouterr().err
    for mine, its in zip(read(SampleSource(Told(tmp_path), seed=3)), found, strict=True):
        assert same(mine, its)
        assert mine.digests == its.digests
    sources.append(other := SampleSource(Told(tmp_path), seed=3, processes=None))  # such as for an evaluation
    other.prepare(at_once=source.processes)
    (tmp_path / "readers").unlink()
    assert all(map(same, read(other), found))
    assert str(os.getpid()) not in (tmp_path / "readers").read_text().split()[1:]
    source.close()
    other.close()
    deadline_s = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids if pid != str(os.getpid())):
        assert time.monotonic() < deadline_s, "a reader is left"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Private, "cannot read samples (RuntimeError: not here)"),
        *nightly_rows(
            (Different, "reads other values than the thread does"),
            (Later, "which reads samples, ended. It was reading positions [110]"),
        ),
    ],
)
def test_what_only_the_thread_can_read_is_read_by_the_thread(
    kind: type[Told],
    why: str,
    tmp_path: Path,
    sources: list[SampleSource],
    capfd: pytest.CaptureFixture[str],
) -> None:
    sources.append(source := SampleSource(kind(tmp_path), seed=3, processes=None))
    source.prepare()
    found = read(source)
    assert source.processes == 0
    assert all(map(same, found, read(SampleSource(kind(tmp_path), seed=3))))
    said = capfd.readouterr().err
    assert why in said
    assert "from now on a thread reads samples" in said


def test_a_slow_first_sample_alone_does_not_keep_the_process_that_forks_readers(
    tmp_path: Path, sources: list[SampleSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    seems(monkeypatch, waited_s=0.0, read_s=1e-4)
    monkeypatch.setattr(varuna.data.measured, "QUICK_S", 0.05)
    others = set(multiprocessing.active_children())  # a run of another test may still have its own
    sources.append(source := SampleSource(SlowAtFirst(tmp_path), seed=3, processes=None))
    source.prepare()
    assert set(multiprocessing.active_children()) - others
    read(source)
    assert not set(multiprocessing.active_children()) - others


def test_what_processes_would_share_is_named_and_what_to_set(
    tmp_path: Path, sources: list[SampleSource], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words").write_text("a few words")
    with (tmp_path / "words").open() as file:
        for dataset, spare, why in (
            (Told(tmp_path, file=file), True, "holds '_io.TextIOWrapper' object"),
            (Told(tmp_path), False, "they must be there from the start"),
        ):
            sources.append(source := SampleSource(dataset, seed=3, processes=None))
            if spare:
                source.prepare()
            read(source)
            said = capfd.readouterr().err
            assert why in said
            assert "num_workers=6 would make a micro-batch about" in said
            assert source.processes == 0


def test_a_file_that_is_read_by_place_is_noticed_though_nothing_holds_it(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("a few words" * 10_000)
    with (tmp_path / "words").open("rb", buffering=0) as file:
        measured = MeasuredReading(SampleSource([1], seed=0).micro_batch, (), forks=True)
        assert measured._why_not() is None
        os.pread(file.fileno(), 5, 3)
        assert measured._why_not() is None
        file.read(5)
        assert "words was open before and is read by place" in str(measured._why_not())
        measured.close()


def pace(**changed: float) -> Pace:
    usual = {"period_s": 0.08, "waited_s": 0.06, "read_s": 0.08, "read_cpu_s": 0.001, "free_processors": 0.0}
    return Pace(**(usual | changed))


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        pytest.param(pace(), 8, id="reads that wait: as many as hide them"),
        pytest.param(pace(waited_s=0.0799), MOST, id="a model that takes no time"),
        pytest.param(pace(waited_s=0.009), 0, id="little to gain"),
        pytest.param(pace(read_cpu_s=0.08), 0, id="reads that compute, no processor free"),
        pytest.param(pace(read_cpu_s=0.08, free_processors=1.0), 4, id="reads that compute, one processor free"),
    ],
)
def test_as_many_processes_as_are_worth_having(seen: Pace, wanted: int) -> None:
    assert seen.wanted == wanted


def test_what_is_local_to_a_function_is_walked_into(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        held = [lambda: file]

        class Local:
            words = held

        assert unshareable(Local()) is None
        assert unshareable([lambda: held]) == "'_io.TextIOWrapper' object"
