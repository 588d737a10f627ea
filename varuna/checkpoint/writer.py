"""Saving behind the training thread's back."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from varuna.checkpoint.shards import SectionState, write_shard
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard


class _Save(NamedTuple):
    """Sections to write for one checkpoint."""

    step: int
    generation: int
    states: Sequence[SectionState]


class BackgroundWriter:
    """One daemon thread that writes one save at a time.

    ``on_saved`` and ``on_error`` run on that thread. A save ends at its first error, since its checkpoint cannot
    become complete any more; the next save is tried again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_saved: Callable[[SavedShard], None],
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        """Start the thread, which waits for saves."""
        self._directory = directory
        self._on_saved = on_saved
        self._on_error = on_error
        self._changed = threading.Condition()  # guards the two fields below
        self._save: _Save | None = None  # until it is written
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="varuna-checkpoint", daemon=True)
        self._thread.start()

    def submit(self, step: int, generation: int, states: Sequence[SectionState]) -> bool:
        """Write ``states`` in the background; the tensors must not change any more.

        False if the previous save still runs, or the writer is closed: this save is skipped, so that a slow disk
        costs checkpoints, not memory.
        """
        with self._changed:
            if self._save is not None or self._closed:
                return False
            self._save = _Save(step, generation, tuple(states))
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is being written; False if ``timeout_s`` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._save is None, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Accept no more saves, and wait up to ``timeout_s`` for the one that runs.

        A save that takes longer goes on in the background; if the process ends first, it leaves no shard.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        """Write saves until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._save is not None)
                if self._save is None:
                    return
                save = self._save
            self._write(save)
            del save  # the tensors are clones: free them now
            with self._changed:
                self._save = None
                self._changed.notify_all()

    def _write(self, save: _Save) -> None:
        """Write all sections of a save."""
        for state in save.states:
            try:
                shard = write_shard(self._directory, save.step, save.generation, state)
            except CheckpointError as error:
                self._on_error(error)
                return
            except Exception as error:  # noqa: BLE001  a dead thread would skip every later save in silence
                problem = CheckpointError(f"section {state.section} of step {save.step} was not saved: {error!r}")
                problem.__cause__ = error
                self._on_error(problem)
                return
            self._on_saved(shard)
