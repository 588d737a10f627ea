"""Saving in the background of the training thread."""

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import NamedTuple

from varuna.checkpoint.header import header_of
from varuna.checkpoint.io.snapshot import Copied
from varuna.checkpoint.names import shard_file, step_folder
from varuna.core.errors import CheckpointError
from varuna.core.saved import SavedShard
from varuna.process.threads import AbandoningThreadPool, start
from varuna.store.base import Store
from varuna.store.retry import writer_id

_CHUNK_BYTES = 8 * 2**20
_AT_ONCE = 4
"""Files written at a time, so that their synchronisations wait together."""


class _Save(NamedTuple):
    """Parts to write for one checkpoint."""

    step: int
    parts: Sequence[Copied]
    ready: Callable[[], None]


class BackgroundWriter:
    """A daemon thread that writes one snapshot at a time.

    ``on_saved`` and ``on_error`` run on that thread. A save ends at its first error, since its checkpoint cannot
    become complete any more; the next save is tried again.
    """

    def __init__(
        self,
        store: Store,
        *,
        on_saved: Callable[[SavedShard], None],
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        """Start the thread, which waits for saves."""
        self._store, self._on_saved, self._on_error = store, on_saved, on_error
        self._writer = writer_id()
        self._changed = threading.Condition()  # guards the fields below
        self._work: list[Callable[[], None]] = []  # the first is under way
        self._saves = 0  # of the work
        self._closed = False
        self._thread = start("checkpoint", self._run)

    @property
    def is_saving(self) -> bool:
        """Whether a snapshot is being written, so that its buffer must not change."""
        with self._changed:
            return self._saves > 0

    def submit(self, step: int, parts: Sequence[Copied], ready: Callable[[], None] = lambda: None) -> None:
        """Write ``parts`` in the background; their bytes must not change while it is saving.

        Args:
            step: steps that the state contains.
            parts: what to write.
            ready: returns once the bytes are in the buffer.
        """
        save = _Save(step, tuple(parts), ready)
        with self._changed:
            self._saves += 1
        self.do(lambda: self._write(save))

    def do(self, work: Callable[[], None]) -> None:
        """Run ``work`` after the saves in progress, while no other thread uses the buffer."""
        with self._changed:
            if not self._closed:
                self._work.append(work)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is being written; False if ``timeout_s`` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._work, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Accept no more saves, and wait up to ``timeout_s`` for the one that runs.

        A save that takes longer continues in the background; if the process ends first, it leaves no shard.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        """Work until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._work))
                if not self._work:
                    return
                work = self._work[0]
            try:
                work()
            except CheckpointError as error:
                self._on_error(error)
            except Exception as error:  # noqa: BLE001  a dead thread would skip every later save in silence
                problem = CheckpointError(
                    f"a checkpoint was not saved because of an internal error (please report it): {error!r}"
                )
                problem.__cause__ = error
                self._on_error(problem)
            del work  # and what it holds
            with self._changed:
                del self._work[0]
                self._changed.notify_all()

    def _write(self, save: _Save) -> None:
        try:
            save.ready()
            with AbandoningThreadPool(1, "checksums") as beside, AbandoningThreadPool(_AT_ONCE, "shards") as crew:
                writes = [
                    crew.submit(write_part, self._store, save.step, copied, self._writer, beside)
                    for copied in save.parts
                ]
                for done in as_completed(writes):
                    self._on_saved(done.result())
        finally:
            with self._changed:
                self._saves -= 1


def write_part(store: Store, step: int, copied: Copied, writer: str, beside: AbandoningThreadPool) -> SavedShard:
    """Write a part's file durably; its checksums are computed on another thread meanwhile.

    Args:
        store: the checkpoint directory.
        step: steps that the state contains.
        copied: the part and its bytes in host memory, which must not change.
        writer: id of this process, for the file's name.
        beside: threads that compute checksums.

    Raises:
        StoreError: it cannot be written; nothing is left under its name.
    """
    part, data = copied
    beginning = header_of(step, part.name, part.pieces, part.scalars)
    sums = [beside.submit(zlib.crc32, data[p.offset : p.offset + p.size_bytes]) for p in part.pieces]

    def chunks() -> Iterator[bytes | memoryview]:
        yield beginning
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]

    file = shard_file(part.name, writer)
    store.write(f"{step_folder(step)}/{file}", chunks)
    return SavedShard(
        step=step,
        generation=part.name.generation,
        section=part.name.section,
        part=part.name.part,
        parts=part.name.parts,
        file=file,
        size_bytes=len(beginning) + len(data),
        pieces=tuple(
            piece.model_copy(update={"offset": len(beginning) + piece.offset, "crc32": crc32.result()})
            for piece, crc32 in zip(part.pieces, sums, strict=True)
        ),
        scalars=part.scalars,
    )
