"""Reads back what was just committed, on a thread of its own: manifest, listing, and random pieces of the parts.

Nothing waits for it: neither training nor commits, and the run's end for some seconds only. A store that hangs keeps
the checkpoint unverified, which is said, and nothing else.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from varuna.checkpoint.manifest import Manifest, check_present, look, read_manifest
from varuna.checkpoint.reading import Target, batches, check_header, expected_header, read, stretches
from varuna.core.errors import CheckpointError, DamagedCheckpoint, ObjectMissing
from varuna.core.saved import SavedShard
from varuna.process.threads import start
from varuna.store.base import Store
from varuna.store.retry import impatient

MOST_BYTES = 64 * 2**20
"""Read of one checkpoint; smaller ones are read whole."""
BOUND_S = 60.0
"""No piece is begun later than this; one that is being read may take as long as the store lets it."""
_PATIENCE_S = 30.0
BATCH_BYTES = 4 * 2**20


class ReadBack(NamedTuple):
    """What reading back a checkpoint has shown."""

    step: int
    read_bytes: int
    """Of the parts, with their headers; each was compared."""
    total_bytes: int
    damage: str = ""
    """What is wrong; empty: what was read is what was written."""
    instead: int | None = None
    """With damage: step of the newest checkpoint that looks whole, if there is one."""


def read_back(
    store: Store,
    manifest: Manifest,
    *,
    is_over: Callable[[], bool] = lambda: False,
    most_bytes: int = MOST_BYTES,
    batch_bytes: int = BATCH_BYTES,
    draw: random.Random | None = None,
) -> ReadBack | None:
    """Compare a checkpoint with its manifest; None if it is gone, was replaced, or ``is_over()`` came first.

    Pieces come in random order, and those that do not fit into what is left of ``most_bytes`` are not read.
    Short pieces that lie side by side are read at once, up to ``batch_bytes``.

    Raises:
        StoreError: the store cannot be read.
    """
    read_bytes = 0
    try:
        if read_manifest(store, manifest.step) != manifest:
            return None
        check_present(store, look(store, manifest.step), manifest.shards)
        for shard, batch, size_bytes in _shuffled(manifest, draw or random.Random(), batch_bytes):
            if read_bytes + size_bytes > most_bytes:
                continue
            if is_over():
                break
            if batch:
                memory = memoryview(bytearray(size_bytes))
                read(store, shard, _placed(batch, memory))
            else:
                check_header(store, shard)
            read_bytes += size_bytes
    except DamagedCheckpoint as error:
        return ReadBack(manifest.step, read_bytes, manifest.size_bytes, str(error))
    except ObjectMissing:  # the manifest: retention, or a person, has removed the checkpoint
        return None
    return ReadBack(manifest.step, read_bytes, manifest.size_bytes) if read_bytes else None


def _shuffled(manifest: Manifest, draw: random.Random, batch_bytes: int) -> list[tuple[SavedShard, list[Target], int]]:
    """All that is read at once: short pieces side by side, a stretch of a long one, or (an empty list) a part's header;
    and its bytes.
    """
    found: list[tuple[SavedShard, list[Target], int]] = []
    for shard in manifest.shards:
        found.append((shard, [], len(expected_header(shard))))
        for batch in batches([part for piece in shard.pieces for part in stretches(piece)], batch_bytes):
            found.append((shard, batch, sum(target.piece.size_bytes for target in batch)))
    draw.shuffle(found)
    return found


def _placed(batch: list[Target], memory: memoryview) -> list[Target]:
    placed, start = [], 0
    for target in batch:
        end = start + target.piece.size_bytes
        placed.append(target._replace(view=memory[start:end]))
        start = end
    return placed


class Verifier:
    """Reads back the newest checkpoint that it was given; older ones that still wait are passed over.

    Args:
        store: that it reads.
        found: hears what was found, on the verifier's thread.
        warn: hears, once until it is well again, that the store cannot be read.
        bound_s: see ``BOUND_S``.
        clock: seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        found: Callable[[Manifest, ReadBack], None],
        warn: Callable[[str], None],
        bound_s: float = BOUND_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._found, self._warn = impatient(store, _PATIENCE_S), found, warn
        self._bound_s, self._clock = bound_s, clock
        self._changed = threading.Condition()  # guards what follows
        self._next: Manifest | None = None
        self._under_way: tuple[int, float] | None = None  # step, and since when
        self._thread: threading.Thread | None = None
        self._is_closed = self._has_complained = False

    def begin(self, manifest: Manifest) -> None:
        """Read it back soon; returns at once."""
        late = None
        with self._changed:
            if self._is_closed:
                return
            if self._under_way is not None and self._clock() > self._under_way[1] + 2 * self._bound_s:
                late = self._under_way[0]
            self._next = manifest
            if self._thread is None:
                self._thread = start("verify", self._run)
            self._changed.notify_all()
        if late is not None:
            self._complain(
                f"the checkpoint of step {late} cannot be read back: no answer for {2 * self._bound_s:.0f} s. It was "
                "committed, and training goes on; whether it can be used is not known."
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to read back; False if ``timeout_s`` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and self._under_way is None, timeout_s)

    def close(self) -> None:
        """What is being read is broken off before its next piece; nothing is found any more."""
        with self._changed:
            self._is_closed, self._next = True, None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next is not None)
                manifest, self._next = self._next, None
                if manifest is None or self._is_closed:
                    return
                deadline_s = self._clock() + self._bound_s
                self._under_way = manifest.step, self._clock()
            try:
                self._verify(manifest, deadline_s)
            finally:
                with self._changed:
                    self._under_way = None
                    self._changed.notify_all()

    def _verify(self, manifest: Manifest, deadline_s: float) -> None:
        try:
            finding = read_back(self._store, manifest, is_over=lambda: self._is_closed or self._clock() > deadline_s)
        except CheckpointError as error:
            finding = None
            self._complain(
                f"the checkpoint of step {manifest.step} cannot be read back: {error}. It was committed, and training "
                "goes on; whether it can be used is not known."
            )
        except Exception as error:  # noqa: BLE001  a dead thread would leave later checkpoints unverified in silence
            finding = None
            self._complain(
                f"the checkpoint of step {manifest.step} cannot be verified because of an internal error (please "
                f"report it): {error!r}"
            )
        if finding is not None and not self._is_closed:
            self._has_complained = False
            self._found(manifest, finding)

    def _complain(self, text: str) -> None:
        if not self._has_complained and not self._is_closed:
            self._has_complained = True
            self._warn(text)
