"""Shards of a remote data set on this machine's disk: downloaded once for all processes, checked, and bounded.

A file under its own name is whole and checked: it was written under another one, and renamed. So a process
that finds it may read it, and one that reads it while another process removes it reads on.
"""

import bz2
import fcntl
import gzip
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from varuna.core.errors import DataError, ObjectMissing, StoreError
from varuna.extras.shards.mds import Shard, StoredFile
from varuna.store.base import Store
from varuna.store.opening import is_local

PIECE_BYTES = 8 * 2**20
_TRIES = 2
"""A shard that arrives damaged is downloaded once more."""
_LOOKS = 10
"""Times that a shard may have been removed by others, who needed room, between looking for it and opening it."""
_WAIT_S, _PAUSE_S = 3600.0, 0.05
"""For another process of this machine that downloads the same shard; its end is noticed at once."""
_USED_S = 5.0
"""A file's time of use is as exact as that."""
_PARTIAL = ".partial"


class ShardCache:
    """A folder that all processes of this machine may share."""

    def __init__(self, place: str, folder: Path, bound_bytes: int | None, store: Callable[[], Store]) -> None:
        """Look at nothing yet.

        Args:
            place: of the data set, as ``location`` names it.
            folder: for copies.
            bound_bytes: of all copies together, but for those that are being used; None: no bound.
            store: opens the data set, in the process that asks.
        """
        self._place, self._folder, self._bound_bytes, self._store = place, folder, bound_bytes, store

    def read(self, shard: Shard, start: int, length: int) -> bytes:
        """Return the bytes of a shard.

        Raises:
            DataError: it is missing or damaged, or its store has not answered for too long.
        """
        for _ in range(_LOOKS):
            path = self.path(shard)
            try:
                file = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # another process has made room
            try:
                found = os.fstat(file)
                if found.st_size != shard.raw.size_bytes and path.parent == self._folder:
                    path.unlink(missing_ok=True)  # cut off since
                    continue
                if found.st_mtime < time.time() - _USED_S and path.parent == self._folder:
                    os.utime(file)
                data = os.pread(file, length, start)
            finally:
                os.close(file)
            if len(data) != length:
                raise DataError(f"{path} is damaged: {length} bytes at {start} reach beyond its end. Remove it")
            return data
        raise DataError(
            f"{shard.raw.name} was removed from {self._folder} {_LOOKS} times before it could be read: allow the cache "
            "more bytes"
        )

    def path(self, shard: Shard) -> Path:
        """Return the shard's file on this machine; downloads it if need be."""
        if shard.packed is None and is_local(self._place):
            path = Path(self._place, shard.raw.name)
            if not path.exists() or path.stat().st_size != shard.raw.size_bytes:
                found = f"has {path.stat().st_size} bytes" if path.exists() else "does not exist"
                raise DataError(f"{path} {found}; its index says {shard.raw.size_bytes} bytes. Copy it again")
            return path
        path = self._folder / shard.raw.name
        if not path.exists():
            if not is_local(self._place) and _forked():
                self._by_new_process(shard)
                return path
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with self._alone(f"{shard.raw.name}.lock"):
                    if not path.exists():
                        self._download(shard, path)
            except OSError as error:
                raise DataError(f"cannot keep {shard.raw.name} in {self._folder}: {error.strerror}") from error
        return path

    def _by_new_process(self, shard: Shard) -> None:
        """Download in a new process, where requests to a bucket do not hang."""
        bound = [] if self._bound_bytes is None else [str(self._bound_bytes)]
        command = [sys.executable, "-m", "varuna.extras.shards.fetch", self._place, str(self._folder), shard.raw.name]
        try:
            done = subprocess.run(
                [*command, *bound], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WAIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"{shard.raw.name} of {self._place} has not come for {_WAIT_S:.0f} s") from error
        if done.returncode:
            raise DataError(done.stderr.strip().rpartition("\n")[2] or f"downloading {shard.raw.name} failed")

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Be the only process of this machine here."""
        deadline_s = time.monotonic() + _WAIT_S
        file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise DataError(f"another process has held {self._folder / name} for {_WAIT_S:.0f} s") from None
                    time.sleep(_PAUSE_S)
            yield
        finally:
            os.close(file)

    def _reserve(self, partial: Path, size_bytes: int) -> None:
        """Remove what has not been used for longest, until there is room for a file that will be written."""
        with self._alone("room.lock"):
            if self._bound_bytes is not None:
                found = list[tuple[float, int, str]]()
                for entry in os.scandir(self._folder):
                    if entry.path != str(partial):
                        with suppress(FileNotFoundError):  # another one has just got its own name, or was removed
                            status = entry.stat()
                            found.append((status.st_mtime, status.st_size, entry.path))
                total = sum(size for _, size, _ in found) + size_bytes
                for used_s, size, path in sorted(found):
                    if total <= self._bound_bytes:
                        break
                    if path.endswith(".lock") or (path.endswith(_PARTIAL) and used_s > time.time() - _WAIT_S):
                        continue
                    Path(path).unlink(missing_ok=True)
                    total -= size
            with partial.open("wb") as file:
                file.truncate(size_bytes)

    def _download(self, shard: Shard, path: Path) -> None:
        stored, partial = shard.packed or shard.raw, path.with_name(path.name + _PARTIAL)
        self._reserve(partial, shard.raw.size_bytes)
        try:
            for attempt in range(_TRIES):
                try:
                    with partial.open("r+b") as file:
                        pieces = self._pieces(stored)
                        for piece in pieces if shard.packed is None else [_unpacked(shard, b"".join(pieces))]:
                            file.write(piece)
                    break
                except _Damaged as damage:
                    if attempt + 1 == _TRIES:
                        raise DataError(
                            f"{stored.name} of {self._place} is damaged: {damage}. It was downloaded {_TRIES} times. "
                            "Write that shard again"
                        ) from damage
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _pieces(self, stored: StoredFile) -> Iterator[bytes]:
        """Yield the bytes of a file; after the last ones, their digests have been checked."""
        sums, store = _Sums(stored), self._store()
        try:
            for start in range(0, stored.size_bytes, PIECE_BYTES):
                piece = bytearray(min(PIECE_BYTES, stored.size_bytes - start))
                store.read_into(stored.name, start, memoryview(piece))
                sums.add(piece)
                yield bytes(piece)
        except ObjectMissing as error:
            raise DataError(
                f"{self._place}/{stored.name} is missing, or shorter than the {stored.size_bytes} bytes that the index "
                f"says: {error}. Copy it again, or write the data set anew"
            ) from error
        except StoreError as error:
            raise DataError(f"cannot read shards: {error}") from error
        sums.check()


def _unpacked(shard: Shard, packed: bytes) -> bytes:
    kind = shard.compression.partition(":")[0]
    unpack = _unpacker(kind)
    try:
        raw = unpack(packed)
    except Exception as error:
        raise _Damaged(f"{kind} cannot unpack it ({error})") from error
    if len(raw) != shard.raw.size_bytes:
        raise _Damaged(f"{len(raw)} bytes unpacked, expected {shard.raw.size_bytes}")
    sums = _Sums(shard.raw)
    sums.add(raw)
    sums.check()
    return raw


class _Damaged(Exception):
    """The bytes that arrived are not those that were written."""


class _Sums:
    """The digests of a file that the index has, as far as Python knows the algorithms."""

    def __init__(self, stored: StoredFile) -> None:
        known = [name for name in stored.hashes if name in hashlib.algorithms_available]
        self._sums = {name: hashlib.new(name, usedforsecurity=False) for name in known}
        self._expected = stored.hashes

    def add(self, data: bytes | bytearray) -> None:
        for each in self._sums.values():
            each.update(data)

    def check(self) -> None:
        for name, each in self._sums.items():
            if each.hexdigest() != self._expected[name]:
                raise _Damaged(f"its {name} is {each.hexdigest()}, expected {self._expected[name]}")


def _unpacker(kind: str) -> Callable[[bytes], bytes]:
    """Raises DataError: what unpacks this is not installed."""
    known: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.decompress, "bz2": bz2.decompress}
    if kind in known:
        return known[kind]
    packages: dict[str, tuple[str, str]] = {"zstd": ("zstandard", "zstandard"), "br": ("brotli", "brotli")}
    if kind not in packages:
        raise DataError(f"shards are compressed as {kind!r}; Varuna reads {', '.join([*known, *packages])}")
    module, package = packages[kind]
    try:
        found: Any = __import__(module)
    except ImportError as error:
        raise DataError(f"these shards are compressed as {kind!r}: pip install {package}") from error
    if kind == "br":
        return lambda data: bytes(found.decompress(data))
    return lambda data: bytes(found.ZstdDecompressor().decompressobj().decompress(data))


def _forked() -> bool:
    from varuna.store.objects import hangs_here

    return hangs_here()


def total_bytes(shards: Sequence[Shard]) -> int:
    """Bytes on disk, unpacked."""
    return sum(shard.raw.size_bytes for shard in shards)
