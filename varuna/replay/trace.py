"""Recorded traces: when nodes came and went."""

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from varuna.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that came or went at one instant."""

    at_s: float
    """Seconds since the start of the trace."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in time order; the first may be at 0, and the trace ends at ``end_s``."""

    changes: tuple[Change, ...]
    end_s: float

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes at any time."""
        return max((count for _, _, count in self.spans()), default=0)

    def spans(self) -> list[tuple[float, float, int]]:
        """Begin, end and number of nodes of each stretch between changes."""
        spans, count = [], 0
        ends_s = [*(change.at_s for change in self.changes[1:]), self.end_s]
        for change, end_s in zip(self.changes, ends_s, strict=True):
            count += len(change.added) - len(change.removed)
            spans.append((change.at_s, end_s, count))
        return spans


def read_trace(path: Path) -> Trace:
    """Read a CSV file of ``time, add|remove, node`` or of ``time, number of nodes``.

    Times are milliseconds, or timestamps (ISO, in one or two columns), ascending. A header line and lines that start
    with ``#`` are skipped. Where only numbers of nodes are given, those that go are drawn by a fixed seed: a cloud does
    not ask which stage a VM runs.

    Raises:
        UsageError: the file cannot be read, or a line is something else.
    """
    try:
        with path.open(newline="") as file:
            rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(csv.reader(file), 1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read the trace {path}: {error}. Name a CSV file.") from error
    rows = [(number, row) for number, row in rows if any(row) and not row[0].startswith("#")]
    if rows and _time_ms(rows[0][1]) is None:
        rows = rows[1:]  # a header
    if not rows:
        raise UsageError(f"the trace {path} has no lines. It needs at least: time, number of nodes")
    events = [_event(path, number, row) for number, row in rows]
    if any(a[0] > b[0] for a, b in pairwise(events)):
        raise UsageError(f"the times of the trace {path} must ascend. Sort it.")
    return _assembled(path, events)


def _event(path: Path, number: int, row: Sequence[str]) -> tuple[float, str, str]:
    """Time in ms, what (``add``, ``remove`` or ``count``), and the node or the number."""
    parsed = _time_ms(row)
    where = f"line {number} of the trace {path}"
    if parsed is None:
        raise UsageError(f"{where} has no time: {', '.join(row)!r}. Write milliseconds or a timestamp first.")
    time_ms, rest = parsed
    match rest:
        case ["add" | "remove" as what, node] if node:
            return time_ms, what, node
        case [count] if count.isascii() and count.isdigit():
            return time_ms, "count", count
    raise UsageError(f"{where} is {', '.join(row)!r}. Write 'time, add|remove, node' or 'time, number of nodes'.")


def _time_ms(row: Sequence[str]) -> tuple[float, list[str]] | None:
    """The time at the start of a row, and the other cells."""
    try:
        return float(row[0]), list(row[1:])
    except ValueError:
        pass
    for cells in (2, 1):
        try:
            moment = datetime.fromisoformat(" ".join(row[:cells]))
        except ValueError:
            continue
        return moment.timestamp() * 1000.0, list(row[cells:])
    return None


def _assembled(path: Path, events: Sequence[tuple[float, str, str]]) -> Trace:
    """Events of one instant become one change; numbers of nodes become names."""
    begin_ms, alive, spent = events[0][0], dict[str, None](), 0
    choose = random.Random(0)
    changes: list[Change] = []
    for time_ms, what, value in events:
        added: list[str] = []
        removed: list[str] = []
        if what == "count":
            more = int(value) - len(alive)
            added = [f"node{spent + i}" for i in range(more)]
            spent += len(added)
            removed = choose.sample(list(alive), -more) if more < 0 else []
        elif what == "add":
            if value in alive:
                raise UsageError(f"the trace {path} adds {value} twice. Each node must leave before it comes again.")
            added = [value]
        elif value not in alive:
            raise UsageError(f"the trace {path} removes {value}, which is not there. Add it first.")
        else:
            removed = [value]
        alive = {**dict.fromkeys(node for node in alive if node not in removed), **dict.fromkeys(added)}
        _merge(changes, Change((time_ms - begin_ms) / 1000.0, tuple(added), tuple(removed)))
    return Trace(tuple(changes), (events[-1][0] - begin_ms) / 1000.0)


def _merge(changes: list[Change], change: Change) -> None:
    """Append, or add to the last change if it is of the same instant."""
    if changes and (changes[-1].at_s == change.at_s or not (change.added or change.removed)):
        last = changes[-1]
        if change.added or change.removed:
            changes[-1] = Change(last.at_s, (*last.added, *change.added), (*last.removed, *change.removed))
    else:
        changes.append(change)
