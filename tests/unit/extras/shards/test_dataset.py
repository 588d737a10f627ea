"""Shards are read as MosaicML wrote them, shared by all who read, checked, and ordered by position alone.

``mds/`` was written by mosaicml-streaming 0.13.0, with and without compression: 60 samples, see ``sample``.
"""

import bisect
import itertools
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from varuna.core.errors import DataError, UsageError
from varuna.data.samples import SampleSource
from varuna.extras.shards import Shards
from varuna.extras.shards.mds import shards_of
from varuna.store.folder import FolderStore

WRITTEN = Path(__file__).with_name("mds")
SIZE = 60


def sample(index: int) -> dict[str, Any]:
    """Return the sample that was written."""
    return {
        "x": np.sin(np.arange(4, dtype=np.float32) + index),
        "labels": index % 3,
        "text": f"sämple {index}",
        "tokens": np.arange(index % 5 + 1, dtype=np.uint16),
    }


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Shards]]:
    yield lambda kind="packed", **options: Shards(WRITTEN / kind, **({"cache": tmp_path / "cache"} | options))
    for thread in threading.enumerate():
        if thread.name == "varuna-shards":  # it downloads ahead, into a folder that is about to go
            thread.join(20)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The data set, to be damaged."""
    return Path(shutil.copytree(WRITTEN / "packed", tmp_path / "data"))


def copies(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").glob("*.mds")}


def shard_of(index: int) -> str:
    """The shard in which a sample was written."""
    shards = shards_of((WRITTEN / "packed" / "index.json").read_bytes(), "index.json")
    return shards[bisect.bisect_right(list(itertools.accumulate(each.samples for each in shards)), index)].raw.name


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_every_sample_is_what_was_written(kind: str, opened: Callable[..., Shards], tmp_path: Path) -> None:
    dataset = opened(kind)
    assert len(dataset) == SIZE
    for index in range(SIZE):
        found = dataset[index]
        assert list(found) == ["labels", "text", "tokens", "x"]
        for key, value in sample(index).items():
            assert np.array_equal(found[key], value)
            assert np.asarray(found[key]).dtype == np.asarray(value).dtype
    assert bool(copies(tmp_path)) == (kind == "packed"), "a folder of plain shards needs no copies"
    with pytest.raises(IndexError, match="sample 60 of 60"):
        dataset[SIZE]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_each_epoch_has_every_sample_once_and_two_windows_at_a_time(
    window: int | None, opened: Callable[..., Shards]
) -> None:
    dataset, source = opened(window=window), SampleSource(opened(window=window), seed=7)
    orders = [[dataset.index_at(epoch * SIZE + place, 7) for place in range(SIZE)] for epoch in range(2)]
    assert all(sorted(order) == list(range(SIZE)) for order in orders)
    assert orders[0] != orders[1]
    assert source.indices([70, 3]) == (orders[1][10], orders[0][3])
    if window == 2:
        numbers = [shard_of(index) for index in orders[0]]
        seen = [set(numbers[place : place + 10]) for place in range(SIZE - 10)]
        assert max(map(len, seen)) <= 4, "ten samples lie in two windows of two shards"


def test_readers_of_a_machine_download_each_shard_once(
    opened: Callable[..., Shards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = FolderStore.read_into

    def counted(self: FolderStore, name: str, start: int, view: memoryview) -> None:
        read.append(name)
        whole(self, name, start, view)

    monkeypatch.setattr(FolderStore, "read_into", counted)
    threads = [
        threading.Thread(target=lambda each: [each[index] for index in range(SIZE)], args=[opened()]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read) == sorted({f"{name}.gz" for name in copies(tmp_path)})


def test_copies_stay_within_their_bound_and_a_lost_one_comes_back(
    opened: Callable[..., Shards], tmp_path: Path
) -> None:
    dataset = opened(window=1, cache_bytes=4000)
    for position in range(2 * SIZE):
        index = dataset.index_at(position, 0)
        assert dataset[index]["text"] == f"sämple {index}"
        assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.mds")) <= 4000
    for name in copies(tmp_path):
        (tmp_path / "cache" / name).write_bytes(b"cut off")
    assert dataset[0]["text"] == "sämple 0"


def test_a_file_that_goes_while_room_is_made_disturbs_nobody(
    opened: Callable[..., Shards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other readers give their copies their names, and remove old ones, at any time."""
    dataset = opened(window=1, cache_bytes=4000)
    assert dataset[0]["text"] == "sämple 0"
    listed, others = os.scandir, tmp_path / "cache" / "shard.00009.mds.partial"

    def then_gone(folder: Path) -> list[os.DirEntry[str]]:
        others.touch()
        found = list(listed(folder))
        assert others.name in [entry.name for entry in found]
        others.unlink()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", then_gone)
        assert [dataset[index]["text"] for index in range(SIZE)] == [f"sämple {index}" for index in range(SIZE)]


def test_what_is_read_soon_is_downloaded_ahead_with_the_window_after_it(
    opened: Callable[..., Shards], tmp_path: Path
) -> None:
    source, dataset = SampleSource(opened(window=2), seed=7), opened(window=2)
    source.announce(range(3))
    for thread in threading.enumerate():
        if thread.name == "varuna-shards":
            thread.join()
    order = list(dict.fromkeys(shard_of(dataset.index_at(place, 7)) for place in range(SIZE)))
    assert set(order[2:4]) <= copies(tmp_path)
    assert len(copies(tmp_path)) <= 4


def test_a_damaged_or_missing_shard_is_named(copied: Path, tmp_path: Path) -> None:
    dataset = Shards(copied, cache=tmp_path / "cache")
    first, second = sorted(copied.glob("shard.*"))[:2]
    data = first.read_bytes()
    first.write_bytes(data[:-9] + b"x" + data[-8:])
    with pytest.raises(
        DataError, match=r"shard\.00000\.mds\.gz of .*/data is damaged: its sha1 is .*downloaded 2 times"
    ):
        dataset[0]
    assert not copies(tmp_path)
    first.write_bytes(data)
    assert dataset[0]["labels"] == 0
    place = next(index for index in range(SIZE) if shard_of(index) != shard_of(0))
    second.write_bytes(second.read_bytes()[:50])
    with pytest.raises(DataError, match=r"shard\.00001\.mds\.gz is missing, or shorter than the \d+ bytes"):
        dataset[place]
    second.unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds\.gz is missing"):
        dataset[place]


def test_a_data_set_goes_into_processes_and_holds_nothing_open(opened: Callable[..., Shards]) -> None:
    dataset = opened()
    dataset.prefetch([0])
    assert dataset[1]["labels"] == 1
    assert pickle.loads(pickle.dumps(dataset))[7]["text"] == "sämple 7"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"column_encodings": ["pkl"] * 4}, "'pkl', which Varuna does not read: it would run", id="pickle"),
        pytest.param({"version": 1}, r"not an index of MDS shards \(ValueError: .*needed: mds, 2", id="version"),
        pytest.param({"samples": 0}, "lists no samples", id="empty"),
        pytest.param({"raw_data": {"basename": "../a", "bytes": 1}}, "is not the name of a shard", id="outside"),
    ],
)
def test_an_index_that_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    shard = json.loads((WRITTEN / "plain/index.json").read_text())["shards"][0]
    with pytest.raises(DataError, match=message):
        shards_of(json.dumps({"shards": [shard | change]}).encode(), "s3://b/index.json")


def test_a_place_without_an_index_and_too_little_room_are_refused(
    tmp_path: Path, opened: Callable[..., Shards]
) -> None:
    with pytest.raises(DataError, match=r"there is no data set at .* Shards need their index\.json"):
        Shards(tmp_path)
    with pytest.raises(UsageError, match=r"cache_bytes=3000 is too little: all shards.*pass window=2 "):
        opened(cache_bytes="3000")
