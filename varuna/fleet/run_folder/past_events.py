"""A run's journal, read from outside, also while a manager writes: the whole of it step by step, or its newest part."""

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from varuna.core.errors import UsageError
from varuna.core.model import JobFacts
from varuna.fleet.run_folder.database import FILE, unreadable
from varuna.fleet.state.account import Account
from varuna.fleet.state.run_events import RunEnded, RunEvent

_event: TypeAdapter[RunEvent] = TypeAdapter(RunEvent)
_STEP = re.compile(r'"step":(\d+),"generation":\d+,"loss":([^,]+),"examples_per_s":([^,]+),')
_BEGINNING = 200
"""Characters of a step's row in which its figures are: its plan, which may be long, follows."""


class PastStep(NamedTuple):
    """A committed step; there may be a million."""

    step: int
    time_s: float
    """Seconds since 1970."""
    loss: float
    examples_per_s: float


def events_and_steps(run_dir: Path) -> Iterator[tuple[float, RunEvent | PastStep]]:
    """Everything that the newest run in a folder has seen but audits, the oldest first.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        query = (
            "SELECT time, kind, CASE kind WHEN 'step_recorded' THEN substr(body, 1, ?) ELSE body END "
            "FROM events WHERE id > ? AND kind != 'audited' ORDER BY id"
        )
        for time_s, kind, body in database.execute(query, (_BEGINNING, _first(database))):
            yield time_s, _step(body, time_s) if kind == "step_recorded" else _event.validate_json(body)


def used_before(run_dir: Path) -> Account:
    """Read what the run in a folder had used up when its newest start began.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        body = _fact(database, "carried")
        return Account() if body is None else Account.model_validate_json(body)


def read_events(run_dir: Path) -> list[RunEvent]:
    """All events that a run directory has seen, of earlier runs too, the oldest first.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        return [_event.validate_json(body) for (body,) in database.execute("SELECT body FROM events ORDER BY id")]


class NewestEvents(NamedTuple):
    """Events of the newest run in a journal, without the steps that came first."""

    events: tuple[RunEvent, ...]
    """The oldest first; without audits."""
    left_out: int
    """Steps; a million of them would take a minute and gigabytes."""


def newest_events(run_dir: Path, steps: int) -> NewestEvents:
    """All that the newest run in a folder has seen, but of its steps the newest ``steps`` only.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        first = _first(database)
        newest = database.execute(
            "SELECT id FROM events WHERE id > ? AND kind = 'step_recorded' ORDER BY id DESC LIMIT 1 OFFSET ?",
            (first, steps),
        ).fetchone()
        older = newest[0] if newest is not None else first
        left_out = database.execute(
            "SELECT COUNT(*) FROM events WHERE id > ? AND id <= ? AND kind = 'step_recorded'", (first, older)
        ).fetchone()[0]
        rows = database.execute(
            "SELECT body FROM events WHERE id > ? AND kind != 'audited' AND (kind != 'step_recorded' OR id > ?) "
            "ORDER BY id",
            (first, older),
        )
        return NewestEvents(tuple(_event.validate_json(body) for (body,) in rows), left_out)


def ending(run_dir: Path) -> RunEnded | None:
    """Read how the newest run in a folder ended; None if it has not.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        last = database.execute(
            "SELECT kind, body FROM events WHERE id > ? AND kind IN "
            "('run_ended', 'generation_started', 'step_recorded', 'worker_joined') ORDER BY id DESC LIMIT 1",
            (_first(database),),
        ).fetchone()
        return RunEnded.model_validate_json(last[1]) if last is not None and last[0] == "run_ended" else None


def newest_step(run_dir: Path) -> PastStep | None:
    """The newest step in a journal; None if there is none.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        row = database.execute(
            "SELECT time, substr(body, 1, ?) FROM events WHERE id > ? AND kind = 'step_recorded' "
            "ORDER BY id DESC LIMIT 1",
            (_BEGINNING, _first(database)),
        ).fetchone()
        return None if row is None else _step(row[1], row[0])


def kept_job(run_dir: Path) -> JobFacts | None:
    """Read the job of the newest run in a folder; None if it never began.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    with _reading(run_dir) as database:
        body = _fact(database, "job")
        return None if body is None else JobFacts.model_validate_json(body)


@contextmanager
def _reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """Read a run's journal; what is no journal is refused in words."""
    path = run_dir / FILE
    if not path.is_file():
        raise UsageError(f"there is no run in {run_dir}: {FILE} is missing. Pass the folder of a run.")
    place = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(place, uri=True, timeout=10.0, check_same_thread=False)) as database:
            yield database
    except (sqlite3.Error, ValueError) as error:
        raise UsageError(unreadable(path, error)) from error


def _first(database: sqlite3.Connection) -> int:
    """Number of the last event before the newest run."""
    return int(_fact(database, "first_event") or 0)


def _fact(database: sqlite3.Connection, name: str) -> str | None:
    row = database.execute("SELECT body FROM facts WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])


def _step(beginning: str, time_s: float) -> PastStep:
    """A step from the beginning of its row.

    Raises:
        ValueError: it is no step.
    """
    found = _STEP.search(beginning)
    if found is None:
        raise ValueError(f"a step that cannot be read: {beginning!r}")
    step, loss, rate = found.groups()
    return PastStep(int(step), time_s, _number(loss), _number(rate))


def _number(text: str) -> float:
    value = json.loads(text)
    return math.nan if value is None else float(value)
