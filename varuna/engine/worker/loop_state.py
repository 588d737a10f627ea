"""State of the training loop: the user's, measurements for a scheduler, options that the loop has written.

The loop runs on every worker, so each has the same. A worker that joins, returns or resumes gets that of a worker whose
loop is farthest, or the checkpoint's. If it lacks the loop's turn after the newest step, the loop gets that step again.
"""

import json
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import torch

from varuna.checkpoint.io.section_state import JSON
from varuna.checkpoint.io.user_values import as_json, from_json
from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.core.vote import StepTotals
from varuna.engine.base.transport import Group
from varuna.engine.stage.parameter_groups import Steering, Writes, Written
from varuna.process.console import NOTE, note, say_once

LOOP = "run/loop"
"""Key of this state among the scalars of section 0 in a checkpoint."""
LARGEST_BYTES = 4 * 2**20
MAY_DIFFER = "the script's"
"""Begins names of state that the script has not named itself; it may have times in it, which differ between workers."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and given back."""

    def state_dict(self) -> Any:
        """Return the state: numbers, texts, small tensors, and lists, tuples and dicts of these."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take such a state."""


Kept = Stateful | MutableMapping[Any, Any]
"""Objects that the user's ``state=`` may name."""


@dataclass(frozen=True)
class Committed:
    """A committed step, with its vote's totals."""

    step: int
    totals: StepTotals
    generation: int
    plan: Plan
    is_main: bool
    step_s: float
    """from the first action to the update, on this rank"""


class LoopStep(NamedTuple):
    """A committed step that the loop has not had, or not to its end."""

    step: int
    totals: StepTotals
    step_s: float


class LoopState:
    """The user's state on this worker, what steers the optimizer, and how many turns of the loop are in them."""

    def __init__(self, kept: Mapping[str, Kept] | None = None, *, writes: bool = False) -> None:
        """Remember what the script begins with, to which the run may fall back.

        Args:
            kept: the user's ``state=``.
            writes: the loop may write the optimizer's options, so a checkpoint owes it the newest step's turn.

        Raises:
            UsageError: a state cannot be saved, or is too large.
        """
        self._kept, self._writes = dict(kept or {}), writes
        self.measured: list[float] = []
        """values that ``step_scheduler`` was called with"""
        self.mark = 0.0
        """a number that tells one list of measurements from another; sums of a million ranks' are exact"""
        self.written: Written | None = None
        """options of the optimizer's groups that the loop has written"""
        self.turns = 0
        """steps whose turn of the loop is contained"""
        self.owed: tuple[LoopStep, ...] = ()
        """steps that the loop is to get first"""
        self._first = self.value(None)

    def value(self, newest: LoopStep | None) -> JSON:
        """Return all of it as JSON.

        Args:
            newest: the newest step, if the model's state contains any.

        Raises:
            UsageError: the user's state cannot be saved, or is too large.
        """
        owed = newest is not None and newest.step >= self.turns
        found: JSON = {
            "measured": as_json(torch.tensor(self.measured, dtype=torch.float64), "measured"),
            "written": None if self.written is None else self.written.as_json(),
            "owed": cast(JSON, [[newest.step, newest.totals.model_dump(), newest.step_s]] if owed and newest else []),
            "state": {name: as_json(_state_of(each), f"state={{{name!r}: ...}}") for name, each in self._kept.items()},
        }
        if (size_bytes := len(json.dumps(found))) > LARGEST_BYTES:
            raise UsageError(
                f"what state= names takes {size_bytes / 2**20:.1f} MiB in each checkpoint, more than "
                f"{LARGEST_BYTES // 2**20} MiB. Keep large things in files of your own, and their paths here."
            )
        return found

    def saved(self, newest: LoopStep | None) -> JSON:
        """Return what a checkpoint keeps; None if nothing but the model has a state."""
        is_none = self.steering.is_none and not self._kept and not self._writes
        return None if is_none else self.value(newest)

    def restart(self) -> None:
        """Become what the script began with: the run begins anew."""
        self.take_state(self._first, 0)

    def resume(self, saved: JSON, next_step: int) -> None:
        """Continue from a checkpoint; what it lacks is as in the beginning."""
        first = cast(dict[str, Any], self._first)
        stored = cast(dict[str, Any], saved) if isinstance(saved, dict) else {}
        state, old = first["state"], stored.get("state", {})
        if new := ", ".join(name for name in state if name not in old):
            say_once(f"{NOTE}the checkpoint of step {next_step} has no state of {new}: it begins as the script made it")
        self.take_state({**first, **stored, "state": {**state, **{k: old[k] for k in old if k in state}}}, next_step)

    def take_state(self, given: JSON, next_step: int) -> None:
        """Become what ``given`` is; of the user's state only what differs is loaded."""
        parts = cast(dict[str, Any], given)
        self.measured, self.mark = [], 0.0
        for value in from_json(parts["measured"]).tolist():
            self.measure(value)
        self.written = None if parts["written"] is None else Written.from_json(parts["written"])
        for name, state in parts["state"].items():
            mine = self._kept[name]
            if _digest(state) != _digest(as_json(_state_of(mine), name)):
                if isinstance(mine, Stateful):
                    mine.load_state_dict(from_json(state))
                else:
                    mine.clear()
                    mine.update(from_json(state))
        self.owed = tuple(
            LoopStep(step, StepTotals.model_validate(totals), step_s) for step, totals, step_s in parts["owed"]
        )
        self.turns = next_step - len(self.owed)

    def measure(self, value: float) -> None:
        """Remember what was measured."""
        self.measured.append(value)
        self.mark = float(zlib.crc32(repr(value).encode(), int(self.mark)))

    @property
    def steering(self) -> Steering:
        """Return what the loop has told the optimizer and its scheduler."""
        return Steering(tuple(self.measured), self.written)

    def write(self, steps: int, values: Writes) -> None:
        """Remember options of the optimizer's groups as the loop leaves them after ``steps`` steps."""
        self.written = Written(steps, len(self.measured), values)

    def note_finished_turn(self, turn: int) -> None:
        """Note that the loop has had ``turn`` to its end."""
        self.turns = turn + 1
        self.owed = ()


class LoopStateOffer(NamedTuple):
    """A worker's loop state as it goes into a generation."""

    turns: int
    value: JSON

    @classmethod
    def of(cls, loop: LoopState, newest: LoopStep | None) -> Self:
        """Return the state that this worker has."""
        return cls(loop.turns, loop.value(newest))

    @classmethod
    def kept(cls, next_step: int, kept: tuple[bool, JSON]) -> Self:
        """Return the state of this worker in the memory checkpoint of ``next_step``, if it has one."""
        is_there, value = kept
        return cls(next_step if is_there else -1, value)


def agree(group: Group, rank: int, members: int, mine: LoopStateOffer) -> JSON:
    """Return the state of the member whose loop is farthest, and which knows of the newest step; blocks.

    Raises:
        RuntimeError: a peer is gone.
    """
    text = json.dumps(mine.value).encode()
    owed = 0 if mine.value is None else len(cast(dict[str, Any], mine.value)["owed"])
    # Columns: steps that it knows of, turns, bytes, checksum of all, checksum of what must be alike.
    table = torch.zeros(members, 5, dtype=torch.int64)
    table[rank] = torch.tensor(
        [mine.turns + owed, mine.turns, len(text), _digest(mine.value), _digest(_named(mine.value))]
    )
    group.all_reduce(table)
    rows = [tuple(row) for row in table.tolist()]
    # The same on every rank: by turns, then the lowest number.
    best = max(range(members), key=lambda member: (rows[member][:2], -member))
    if all(row[2:] == rows[best][2:] for row in rows):
        return mine.value
    if rank == best and any(row[:2] == rows[best][:2] and row[4] != rows[best][4] for row in rows):
        note(
            "what state= names differs between workers, so all go on with that of one. Every worker must change it in "
            "the same way: by what the steps say, not by time, rank or is_main."
        )
    words = torch.zeros(rows[best][2], dtype=torch.uint8)
    if rank == best:
        words += torch.frombuffer(bytearray(text), dtype=torch.uint8)
    group.all_reduce(words)
    return cast(JSON, json.loads(bytes(words.tolist())))


def _named(value: JSON) -> JSON:
    """Return the state without what may differ between workers."""
    if not isinstance(value, dict):
        return value
    state = cast(dict[str, JSON], value["state"])
    return {**value, "state": {name: each for name, each in state.items() if not name.startswith(MAY_DIFFER)}}


def _state_of(kept: Kept) -> object:
    return kept.state_dict() if isinstance(kept, Stateful) else kept


def _digest(value: JSON) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
