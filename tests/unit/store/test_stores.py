"""A store's promises, of a directory and of obstore alike."""

import errno
import os
import threading
from pathlib import Path

import pytest

from varuna.core.errors import ObjectExists, ObjectMissing, StoreError, UsageError
from varuna.store.base import Store
from varuna.store.folder import FolderStore
from varuna.store.opening import location, open_store


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path / "store" if request.param == "folder" else f"memory://{request.node.nodeid}")


def test_what_was_written_is_read_back_and_listed(store: Store) -> None:
    assert store.folders() == []
    assert store.entries("a") == []
    store.put("a/x", b"one")
    store.put("a/x", b"two")
    store.write("a/b/y", lambda: [b"abc", memoryview(b"def")])
    assert store.get("a/x") == b"two"
    view = bytearray(3)
    assert store.size_bytes("a/b/y") == len(store.get("a/b/y"))
    store.read_into("a/b/y", 2, memoryview(view))
    assert bytes(view) == b"cde"
    assert store.folders() == ["a"]
    assert store.entries("a") == [("a/b/y", 6), ("a/x", 3)]
    assert store.entries() == store.entries("a")


def test_only_one_writer_creates_a_name(store: Store) -> None:
    won: list[int] = []

    def write(writer: int) -> None:
        try:
            store.create("name", b"%d" % writer)
            won.append(writer)
        except ObjectExists:
            pass

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % writer for writer in won] == [store.get("name")]


def test_what_is_missing_says_so_unless_it_is_to_be_removed(store: Store) -> None:
    with pytest.raises(ObjectMissing, match="gone"):
        store.get("gone")
    with pytest.raises(ObjectMissing):
        store.read_into("gone", 0, memoryview(bytearray(1)))
    with pytest.raises(ObjectMissing):
        store.size_bytes("gone")
    store.remove("gone")
    store.remove_folder("gone")


def test_folders_move_and_go(store: Store) -> None:
    store.put("old/x", b"1")
    store.put("old/deep/y", b"2")
    store.put("older/x", b"3")
    store.rename_folder("old", "away/old")
    assert [entry.name for entry in store.entries()] == ["away/old/deep/y", "away/old/x", "older/x"]
    store.remove_folder("away")
    assert store.folders() == ["older"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "", "a//b", "a b", "."])
def test_no_name_leads_out_of_the_store(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="not a valid name"):
        store.get(name)
    with pytest.raises(StoreError, match="not a valid name"):
        store.put(name, b"")


def test_a_range_behind_the_end_is_an_error(store: Store) -> None:
    store.put("x", b"12345")
    with pytest.raises(StoreError):
        store.read_into("x", 3, memoryview(bytearray(4)))


@pytest.mark.parametrize(
    ("place", "known"),
    [
        ("s3://bucket/runs/a/", "s3://bucket/runs/a"),
        ("file:///tmp/a%20b", "/tmp/a b"),
        ("memory://x", "memory://x"),
        ("/tmp/x", "/tmp/x"),
    ],
)
def test_places_have_one_name(place: str, known: str) -> None:
    assert location(place) == known


def test_a_relative_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert location("x") == str(tmp_path / "x")


@pytest.mark.parametrize("place", ["ftp://host/x", "s3:///x"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(UsageError, match="not a place for checkpoints"):
        open_store(place)


@pytest.mark.parametrize(
    "place",
    [
        "s3://b/run/%2e%2e/x",
        "s3://b/run/..",
        "s3://b/run/./x",
        "gs://b/run\\..\\x",
        "az://c/run?x",
        "s3://b/run#x",
        "s3://b/run/.\t./x",
        "s3://b/run/.\n.",
        "s3://b/run/.. /",
    ],
)
def test_a_place_in_a_bucket_is_where_its_text_says_or_refused(place: str) -> None:
    with pytest.raises(UsageError, match="has a meaning of its own in a URL"):
        open_store(place)


def test_dots_and_spaces_within_the_name_of_a_folder_are_no_riddle() -> None:
    for place in ("s3://b/run.1/..x/a b", "gs://b/.hidden/x..", "az://c/x.", "/tmp/100% #1?/.."):
        assert location(place) == place


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.put("x", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="No space left on device"):
            write("x" if write == store.put else "y", b"new")
    monkeypatch.undo()
    assert store.get("x") == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_system_without_links_still_creates_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = FolderStore(tmp_path)
    store.create("x", b"first")
    with pytest.raises(ObjectExists):
        store.create("x", b"second")
    assert store.get("x") == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_a_store_is_refused_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://forked")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(StoreError, match="before a fork"):
        store.folders()


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("step/shard", b"x")
    killed, alive = tmp_path / "step" / ".a.00000000.partial", tmp_path / "step" / ".b.00000000.partial"
    for left in (killed, alive):
        left.touch()
    long_ago_s = killed.stat().st_mtime - 2 * 3600
    os.utime(killed, (long_ago_s, long_ago_s))
    for number in range(32):  # listed, and gone when they are looked at: their writers have just finished
        (tmp_path / "step" / f".c.{number:08x}.partial").symlink_to(tmp_path / "gone")
    store.create("step/manifest.json", b"{}")
    assert (killed.exists(), alive.exists()) == (False, True)
