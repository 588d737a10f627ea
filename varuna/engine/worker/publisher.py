"""Publications during a run: copied aside between two steps, written in the background, put together by rank 0.

    step    s        s+1   ...                              s+j
    vote    no rank still writes                            no rank still writes: the next may follow
    all     copy     each writer writes its sections' part  ------->
            aside    rank 0 waits for all parts, completes the folder, renames it

Each section's first holder writes it. If a rank still writes when the next publication is due, the vote says so to all,
and that one is skipped.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from varuna.checkpoint.io.export import own_names
from varuna.checkpoint.published import PublishedFolder, sync, unpublished
from varuna.core.errors import CheckpointError
from varuna.core.messages import Assignment
from varuna.core.units import format_duration
from varuna.engine.device.host_copies import DONE, HostCopies, Ready
from varuna.engine.worker.generation import Generation
from varuna.engine.worker.tell import tell_all
from varuna.process.background_work import BackgroundWork
from varuna.process.console import warn

PARTS_BOUND_S = 600.0
"""Most seconds that rank 0 waits for the parts of other ranks."""
_LAST_PARTS_S = 10.0
"""The same once another generation has begun: who is lost will write nothing more."""
FLUSH_BOUND_S = 600.0
"""Most seconds that the end of a run waits for its last publication."""
_LOOK_S = 0.1


class Form(Protocol):
    """The form of a publication: its entries and files."""

    metadata: Mapping[str, str]
    """of the files of parts"""

    def wants(self, path: str) -> bool:
        """Return whether an entry of a section's state, such as ``parameters/head.weight``, is published."""
        ...

    def file_of(self, part: int, parts: int) -> str:
        """Return the name of the file of one part."""
        ...

    def complete(self, folder: Path, files: Sequence[str]) -> None:
        """Add what a folder with all parts lacks.

        Raises:
            CheckpointError: it cannot be made of these parts.
            OSError: the folder cannot be written.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A rank's part in one publication."""

    step: int
    before: int | None
    turn: str
    generation: int
    rank: int
    files: Mapping[int, str]
    """by rank that writes one"""
    own: Mapping[str, Tensor] | None
    copied: Ready


class Publisher:
    """A worker's part in publications; the training thread calls it, and one thread of its own writes."""

    def __init__(self, folder: PublishedFolder, every: int, form: Form, *, parts_s: float = PARTS_BOUND_S) -> None:
        """Begin with nothing published.

        Args:
            folder: receives publications.
            every: steps between them.
            form: what they consist of.
            parts_s: how long rank 0 waits for other ranks' parts.
        """
        self._folder, self._every, self._form, self._parts_s = folder, every, form, parts_s
        self._turn: str | None = None  # of the present generation; empty: it cannot publish
        self._generation = -1
        self._work = BackgroundWork("publish", lambda error: warn(f"nothing was published: {error!r}"))
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._newest = (-1, -1)  # generation and steps
        self._copied: Ready = DONE
        self._room: tuple[list[Tensor], list[Tensor]] = [], []  # values of this form, and host memory for them

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes the newest publication."""
        return not self._idle.is_set()

    def is_due(self, step: int) -> bool:
        """Return whether the state after ``step`` should be published."""
        return (step + 1) % self._every == 0

    def enter(self, assignment: Assignment) -> None:
        """Enter a generation, which may take over memory that is still being copied."""
        self._copied.wait()
        self._generation, self._turn = assignment.generation, None

    def skip(self, generation: Generation) -> None:
        """Say that what is due now is not published, since ranks still write."""
        if generation.assignment.rank == 0:
            warn(
                f"the publication of step {generation.stage.next_step} in {self._folder.path} is skipped, because the "
                "previous one is still being written"
            )

    def publish(self, generation: Generation) -> None:
        """Copy this rank's part of the state, and write it in the background; all ranks call this at the same step.

        A second call at one step does nothing.

        Raises:
            GenerationEnded: the manager ended the generation.
            LinkError: a link broke.
        """
        stage, rank = generation.stage, generation.assignment.rank
        _, before = self._newest
        if self._newest == (self._generation, stage.next_step):
            return
        self._newest = self._generation, stage.next_step
        if self._turn is None:
            self._turn = self._agreed(generation)
        turn = self._turn
        homes = {
            section: generation.plan.home_of(holders[0], section)
            for section, holders in enumerate(stage.sharding.holders)
        }
        writers = sorted(set(homes.values()))
        if not turn or rank not in (0, *writers):
            return
        values: dict[str, Tensor] = {}
        for section in (section for section, home in homes.items() if home == rank):
            values.update(own_names(stage.state_of(section, owned_only=True).only(self._form.wants)))
        copies = stage.job.traffic.saves
        hosts = self._hosts(list(values.values()), copies)
        self._copied = stage.copied = copied = copies.copy_to_host(list(zip(values.values(), hosts, strict=True)))
        task = _Task(
            step=stage.next_step,
            before=before if rank and before >= 0 else None,  # rank 0 completes one after the other
            turn=turn,
            generation=self._generation,
            rank=rank,
            files={each: self._form.file_of(at, len(writers)) for at, each in enumerate(writers)},
            own=dict(zip(values, hosts, strict=True)) if rank in writers else None,
            copied=copied,
        )
        self._idle.clear()
        self._work.do(lambda: self._write(task))

    def flush(self) -> None:
        """Wait for the newest publication; says so if it does not end."""
        if not self._idle.wait(FLUSH_BOUND_S):
            warn(f"the last publication was still being written after {format_duration(FLUSH_BOUND_S)}")

    def close(self) -> None:
        """Wait for no rank's part any more; the thread ends after what it was given."""
        self._closed = True
        self._work.close()

    def _agreed(self, generation: Generation) -> str:
        """Return the turn that rank 0 takes for this generation; empty if it cannot."""
        turn = ""
        if generation.assignment.rank == 0:
            try:
                turn = self._folder.take_turn()
            except CheckpointError as error:
                warn(str(error))
        if generation.plan.workers == 1:
            return turn
        data = turn.encode() if generation.assignment.rank == 0 else None
        return tell_all(generation, ("publish", "turn"), data, "who publishes").decode()

    def _hosts(self, values: list[Tensor], copies: HostCopies) -> list[Tensor]:
        """Return host memory for values, kept for the next ones that are alike."""
        known, _ = self._room
        if [(each.shape, each.dtype) for each in known] != [(each.shape, each.dtype) for each in values]:
            self._room = [], []  # never two of them
            self._room = [value.to("meta") for value in values], copies.homes_for(values)
        return self._room[1]

    def _write(self, task: _Task) -> None:
        """Write a part; rank 0 then waits for the others', and lets the whole appear."""
        step, place = task.step, self._folder.path
        try:
            task.copied.wait()
            written = self._folder.begin(step, task.turn, task.before)
            if task.own is not None:
                file = task.files[task.rank]
                partial = written / f".{file}.partial"
                save_file(dict(task.own), str(partial), metadata=dict(self._form.metadata))
                sync(partial)
                partial.rename(written / file)
            if task.rank == 0 and self._has_all(written, task):
                self._form.complete(written, list(task.files.values()))
                if not self._folder.publish(written, step, task.turn):
                    warn(f"step {step} is not published: a newer generation, or another run, publishes in {place} now")
        except OSError as error:
            warn(f"step {step} is not published: {unpublished(place, error)}")
        except CheckpointError as error:
            warn(f"step {step} is not published: {error}")
        finally:
            self._idle.set()

    def _has_all(self, written: Path, task: _Task) -> bool:
        """Wait for the parts of all ranks; says which ones do not come."""
        until_s, is_over = time.monotonic() + self._parts_s, False
        while missing := [rank for rank, file in task.files.items() if not (written / file).exists()]:
            if self._closed:
                return False
            if self._generation != task.generation and not is_over:
                until_s, is_over = min(until_s, time.monotonic() + _LAST_PARTS_S), True
            if time.monotonic() >= until_s:
                names = f"the parts of ranks {', '.join(map(str, missing))}"
                why = (
                    "did not come before their generation ended"
                    if is_over
                    else f"did not appear in {written} within {format_duration(self._parts_s)}. {self._folder.path} "
                    "must be a folder that the machines of all ranks share. Where there is none, give checkpoints= a "
                    "bucket, and export from there"
                )
                warn(f"step {task.step} is not published: {names} {why}.")
                return False
            time.sleep(_LOOK_S)
        return True
