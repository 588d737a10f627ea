"""When a rank saves, and what: its share of the sections, cloned at a step boundary, written behind its back."""

import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from varuna.checkpoint.files import unwritable
from varuna.checkpoint.shards import SectionState
from varuna.checkpoint.writer import BackgroundWriter
from varuna.core.errors import CheckpointError
from varuna.core.messages import SavedShard
from varuna.engine.stage import Stage

FLUSH_BOUND_S = 600.0
"""How long the end of a run waits for the last checkpoint to be durable."""


class Saver:
    """Decides (on rank 0) when a checkpoint is due, and hands copies of this rank's sections to the writer."""

    def __init__(self, directory: Path, every: int | timedelta, on_saved: Callable[[SavedShard], None]) -> None:
        self._every = every
        self._last_s = time.monotonic()
        self.newest = (-1, -1)
        """generation of the newest save, and the steps that it contains"""
        self._writer = BackgroundWriter(directory, on_saved=on_saved, on_error=_warn)

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` should be saved; asked on rank 0 only, told to all by the vote."""
        if isinstance(self._every, int):
            return (step + 1) % self._every == 0
        return time.monotonic() - self._last_s >= self._every.total_seconds()

    def save(self, stage: Stage, replica: int, generation: int) -> None:
        """Save the sections that fall to this replica; skipped if the last save still runs."""
        self._last_s, self.newest = time.monotonic(), (generation, stage.next_step)
        mine = [section for section in stage.sections if section % stage.plan.replicas == replica]
        states = [_copied(stage.state_of(section, owned_only=True)) for section in mine]
        if states and not self._writer.submit(stage.next_step, generation, states):
            _warn(f"the checkpoint of step {stage.next_step} is skipped: the one before is still being written")

    def flush(self) -> None:
        """Wait for the last save; says so if it does not end."""
        if not self._writer.flush(FLUSH_BOUND_S):
            _warn(f"the last checkpoint was still being written after {FLUSH_BOUND_S:.0f} s; the one before stands")


def check_writable(directory: Path) -> None:
    """Find out now, not at the first save.

    Raises:
        CheckpointError: the folder cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise unwritable("write to", directory, error) from error


def _copied(state: SectionState) -> SectionState:
    """Independent of the tensors that go on training."""
    return SectionState(
        state.section, {name: value.detach().clone() for name, value in state.tensors.items()}, dict(state.scalars)
    )


def _warn(text: str | CheckpointError) -> None:
    print(f"varuna: warning: {text}", file=sys.stderr, flush=True)
