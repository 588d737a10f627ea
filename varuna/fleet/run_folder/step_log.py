"""The user's JSON log: a line for each committed step, and no gap, whatever happens to its disk or to the manager."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from varuna.core.errors import UsageError
from varuna.fleet.state.run_events import StepRecorded
from varuna.process.file_lock import locked

_TAIL_BYTES = 2**20
WAITING_BYTES = 64 * 2**20
"""Of lines that wait for a place: some 250,000 steps."""
_BEGINNING = b'{"step": '


class _Step(NamedTuple):
    """A step as a line of the log has it."""

    generation: int
    step: int
    loss: str


class StepLog:
    """Lines that cannot be written wait in memory; those that a manager took with it come from its journal.

    Steps that a power cut took from the journal, and not from this file, are heard of again: each has one line.

    Args:
        path: the file.
        waiting_bytes: most of what waits; what came first is left out then.

    Raises:
        OSError: the file cannot be opened.
        UsageError: another run writes it.
    """

    def __init__(self, path: Path, *, waiting_bytes: int = WAITING_BYTES) -> None:
        self.path, self._most_waiting_bytes, self._left_out = path, waiting_bytes, 0
        self._file = path.open("ab", buffering=0)
        self._lines = bytearray()
        self._ahead: set[tuple[int, int]] = set()
        """Generation and number of steps of this run that the file has, and the journal has not."""
        if not locked(self._file.fileno()):
            self._file.close()
            raise UsageError(f"another run writes to {path}. Pass another --json-log.")
        self._drop_half_a_line()

    def append(self, steps: Iterable[tuple[float, StepRecorded]]) -> OSError | None:
        """Write a line for each, after those that wait; why that cannot be done now, if it cannot."""
        for time_s, event in steps:
            if (event.generation, event.step) not in self._ahead:
                self._lines += _line(event, time_s)
        error = self.flush()
        if len(self._lines) > self._most_waiting_bytes:
            first = self._lines.index(b"\n") + 1  # half of this line may be in the file
            end = self._lines.index(b"\n", first + self._most_waiting_bytes // 4) + 1
            self._left_out += self._lines.count(b"\n", first, end)
            del self._lines[first:end]
        return error

    def flush(self) -> OSError | None:
        """Write what waits."""
        try:
            while self._lines:
                del self._lines[: self._file.write(self._lines)]
        except OSError as error:
            return error
        return None

    def catch_up(self, newest_first: Iterable[tuple[float, StepRecorded]]) -> int:
        """Add the steps of this run that came after the last one in the file; returns how many were missing.

        A file without any step of this run is left as it is: it is a new one, or was moved away.
        """
        known = [found for line in self._tail().splitlines() if (found := _step_in(line)) is not None]
        missing: list[bytes] = []
        for time_s, event in newest_first:
            this = _Step(event.generation, event.step, json.dumps(event.loss))
            if not missing and this in known:
                self._ahead = {(step.generation, step.step) for step in known[known.index(this) + 1 :]}
                return 0
            if known and this == known[-1]:
                self._lines += b"".join(reversed(missing))
                self.flush()
                return len(missing)
            missing.append(_line(event, time_s))
        return 0

    def close(self) -> int:
        """Write what waits, if it can be now; returns how many lines have never been."""
        self.flush()
        self._file.close()
        return self._left_out + self._lines.count(b"\n")

    def _drop_half_a_line(self) -> None:
        """A line that was cut off with its manager, or by a full disk; another's text is only ended."""
        rest = self._tail().rpartition(b"\n")[2]
        if not rest:
            return
        if rest.startswith(_BEGINNING) or _BEGINNING.startswith(rest):
            os.truncate(self.path, self.path.stat().st_size - len(rest))
        else:
            self._lines += b"\n"

    def _tail(self) -> bytes:
        if not self.path.is_file():
            return b""  # a pipe or a terminal has nothing to look at
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()


def _step_in(line: bytes) -> _Step | None:
    try:
        values = json.loads(line)
        return _Step(values["generation"], values["step"], json.dumps(values["loss"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _line(event: StepRecorded, time_s: float) -> bytes:
    """A line of the log; a loss that is not a number is written as NaN."""
    plan = event.plan
    values = {
        "step": event.step,
        "loss": event.loss,
        "generation": event.generation,
        "training": event.training,
        "plan": {
            "stages": plan.stages,
            "replicas": plan.replicas,
            "shape": plan.shape,
            "micro_batch": plan.micro_batch,
            "micro_batches": plan.micro_batches,
        },
        "examples_per_s": event.examples_per_s,
        "wall_time": time_s,
    }
    return json.dumps(values).encode() + b"\n"
