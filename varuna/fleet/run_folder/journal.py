"""The run on disk: every event in the run's database, every committed step in the user's JSON log."""

import contextlib
import os
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from varuna.core.errors import FleetError
from varuna.core.messages import Vote
from varuna.core.model import JobFacts
from varuna.core.units import counted
from varuna.core.value import Value
from varuna.fleet.run_folder.database import FILE, open_database
from varuna.fleet.run_folder.step_log import StepLog
from varuna.fleet.state.account import Account
from varuna.fleet.state.run_events import Asked, GenerationStarted, RunEnded, RunEvent, StepRecorded, VerdictReached
from varuna.process.console import warn

RESERVE_BYTES = 24 * 2**20
"""For a decision, and the rows that may wait before it (``journal.WAITING_BYTES``)."""
_LEAVES = 4
"""A disk with less room than so many times the reserve keeps none: it would be what fills it."""


class Reserve:
    """A file whose only use is its room.

    Args:
        path: the file.
        size_bytes: of it.
    """

    def __init__(self, path: Path, size_bytes: int = RESERVE_BYTES) -> None:
        self.path, self.size_bytes = path, size_bytes

    def take_room(self) -> None:
        """Take the room, if it is not taken yet and the disk has plenty."""
        with contextlib.suppress(OSError):
            if self.path.exists() or shutil.disk_usage(self.path.parent).free < _LEAVES * self.size_bytes:
                return
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                _fill(descriptor, self.size_bytes)
            except OSError:
                self.give_up()
            finally:
                os.close(descriptor)

    def give_up(self) -> bool:
        """Free the room; False if none was kept."""
        try:
            self.path.unlink()
        except OSError:
            return False
        return True


def _fill(descriptor: int, size_bytes: int) -> None:
    """Give a file its blocks: a length alone takes no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:  # macOS
        os.write(descriptor, bytes(size_bytes))


_event: TypeAdapter[RunEvent] = TypeAdapter(RunEvent)
_PATIENCE_S = 60.0
"""Seconds for which a write that binds the future is retried: nobody may hear of it before it is on disk."""
_PAUSE_S = 1.0
WAITING_BYTES = 16 * 2**20
"""Of rows that wait for a place: some 20,000 steps."""
RESERVE = "run.db-reserve"
"""File in the run's folder, of no content."""
STEPS_READ = 2000
"""As many as the page draws."""
_REMEDY = "Is the disk full, or another process using the file?"


class _Row(NamedTuple):
    """An event on its way to the disk."""

    time_s: float
    kind: str
    body: str
    step: StepRecorded | None
    """Of which the log of steps gets a line."""


class Past(Value):
    """Facts of a run that its restarted manager must know."""

    run: str
    job: JobFacts | None = None
    version: str = ""
    vote: Vote | None = None
    events: tuple[RunEvent, ...] = ()


class Journal:
    """A row per event; once ``append`` returns it survives the death of this process.

    What binds the future, a verdict, a promise or the number of a generation, survives a power cut too, and room is
    kept for it on the disk. While the disk is full, anything else waits in memory for a place, within bounds: a manager
    that is lost meanwhile hears of it from the workers again. A step's line in the JSON log comes after its row.

    Args:
        run_dir: gets the database.
        json_log: the log of steps; None: there is none.
        sleep: waits.
        say: tells the run's user what cannot be written.
        clock: seconds.
        waiting_bytes: most of what waits for a place.

    Raises:
        FleetError: the database cannot be used.
        OSError: the JSON log cannot be written.
        UsageError: another run writes it.
    """

    def __init__(
        self,
        run_dir: Path,
        json_log: Path | None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = warn,
        clock: Callable[[], float] = time.monotonic,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._steps = StepLog(json_log) if json_log is not None else None
        self._path, self._database = run_dir / FILE, open_database(run_dir)
        self._sleep, self._say, self._clock = sleep, say, clock
        self._rows: deque[_Row] = deque()
        self._waiting_bytes, self._most_waiting_bytes = 0, waiting_bytes
        self._left_out = 0
        self._again_s = float("-inf")
        """Time of the next try to write rows that bind nothing: each attempt writes all that wait."""
        self._told: set[str] = set()
        self._vote: Vote | None = None  # the newest that is not written; those before it nobody needs
        self._reserve = Reserve(run_dir / RESERVE)
        self._reserve.take_room()

    def append(self, event: RunEvent, *, vote: Vote | None = None) -> None:
        """Write one event, and the newest vote with the step that it committed.

        Raises:
            FleetError: what binds the future cannot be written, for a minute.
        """
        body = event.model_dump_json()
        step = event if self._steps is not None and isinstance(event, StepRecorded) else None
        self._rows.append(_Row(time.time(), event.kind, body, step))
        self._vote = vote or self._vote
        self._waiting_bytes += len(body)
        self._leave_out()
        if isinstance(event, VerdictReached | GenerationStarted | Asked):
            self._surely()
        elif self._clock() >= self._again_s:
            self._attempt()

    def sync(self) -> bool:
        """Whether everything that was appended survives a power cut from now on."""
        # a transaction without a change would not reach the disk
        return self._attempt(lambda: self._keep("synced", str(time.time())), durably=True) is None

    def _leave_out(self) -> None:
        """Keep what waits for a place within bounds; what came first goes first."""
        while self._waiting_bytes > self._most_waiting_bytes and len(self._rows) > 1:
            self._waiting_bytes -= len(self._rows.popleft().body)
            self._left_out += 1
            if self._left_out == 1:
                self._say(
                    f"{self._path} cannot be written for so long that what came first no longer waits for it: steps "
                    f"will be missing in it and in the log of steps. {_REMEDY}"
                )

    def _attempt_with_reserve(self, insert: Callable[[], None] = lambda: None) -> sqlite3.Error | None:
        """Write what must be written now, durably; a full disk has room kept for that."""
        error = self._attempt(insert, durably=True)
        if error is None or not _is_full(error) or not self._reserve.give_up():
            return error
        self._say(f"the room that was kept for {self._path} on its disk, which is full, is in use now. Make room there")
        return self._attempt(insert, durably=True)

    def _attempt(self, insert: Callable[[], None] = lambda: None, *, durably: bool = False) -> sqlite3.Error | None:
        """Write what waits and what ``insert`` does, in one transaction; then the lines of the log of steps."""
        error = self._transact(insert, durably=durably)
        self._tell("the run's journal", self._path, error)
        if error is not None:
            self._again_s = self._clock() + _PAUSE_S
            return error
        steps = [(row.time_s, row.step) for row in self._rows if row.step is not None]
        self._rows.clear()
        self._waiting_bytes, self._vote = 0, None
        if self._left_out:
            self._say(f"{counted(self._left_out, 'row')} that had no place any more are missing in {self._path}")
            self._left_out = 0
        if self._steps is not None and steps:
            self._tell("the log of steps", self._steps.path, self._steps.append(steps))
        return None

    def _transact(self, insert: Callable[[], None], *, durably: bool) -> sqlite3.Error | None:
        """Run one transaction, completely or not at all."""
        try:
            self._database.execute(f"PRAGMA synchronous={'FULL' if durably else 'NORMAL'}")
            self._database.execute("BEGIN IMMEDIATE")
            rows = [(row.time_s, row.kind, row.body) for row in self._rows]
            self._database.executemany("INSERT INTO events (time, kind, body) VALUES (?, ?, ?)", rows)
            if self._vote is not None:
                self._keep("vote", self._vote.model_dump_json())
            insert()
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            return error
        return None

    def _surely(self, insert: Callable[[], None] = lambda: None) -> None:
        """Try for a minute; a signal to leave waits as long.

        Raises:
            FleetError: it cannot be written.
        """
        for _ in range(int(_PATIENCE_S / _PAUSE_S)):
            error = self._attempt_with_reserve(insert)
            if error is None:
                self._reserve.take_room()
                return
            self._sleep(_PAUSE_S)
        raise FleetError(
            f"{self._path} cannot be written ({error}), and decisions must be written before they are announced. "
            f"{_REMEDY} Fix that, and start the same command again."
        ) from error

    def _tell(self, what: str, path: Path, error: Exception | None) -> None:
        """Once when it fails, and once when it is well again."""
        if error is not None and what not in self._told:
            self._told.add(what)
            self._say(f"{what} cannot be written to {path} ({error}); waiting. {_REMEDY}")
        elif error is None and what in self._told:
            self._told.remove(what)
            self._say(f"{what} can be written again")

    @property
    def is_new(self) -> bool:
        """Whether no run was ever written down here."""
        return self._newest() == 0 and not self._database.execute("SELECT 1 FROM facts WHERE name = 'run'").fetchone()

    def keep_account(self, account: Account) -> None:
        """Record what the run has used up until now, for its next start."""
        self._attempt(lambda: self._keep("account", account.model_dump_json()))

    def account(self) -> Account:
        """Return what the newest run here had used up when that was recorded last."""
        row = self._database.execute("SELECT body FROM facts WHERE name = 'account'").fetchone()
        return Account() if row is None else Account.model_validate_json(row[0])

    def begin_run(self, run: str, before: Account | None = None) -> None:
        """Start a run, or start it again after it has used up so much: its earlier events are history."""
        body = (before or Account()).model_dump_json()

        def insert() -> None:
            self._keep("carried", body)
            self._keep("account", body)
            for name in ("job", "version", "wire", "vote", "identity"):
                self._database.execute("DELETE FROM facts WHERE name = ?", (name,))
            self._keep("run", run)
            self._keep("first_event", str(self._newest()))

        self._surely(insert)

    def keep_job(self, job: JobFacts, version: str, wire: str) -> None:
        """Record what the run trains, with which Varuna, and a digest of what its machines say to each other."""

        def insert() -> None:
            self._keep("job", job.model_dump_json())
            self._keep("version", version)
            self._keep("wire", wire)

        self._surely(insert)

    def written_by(self) -> tuple[str, str] | None:
        """The version and the ``wire`` of the run that did not end; None: there is none, or it does not say."""
        facts: dict[str, str] = dict(self._database.execute("SELECT name, body FROM facts WHERE name <> 'job'"))
        if "version" not in facts or "wire" not in facts:
            return None
        ended = "SELECT 1 FROM events WHERE id > ? AND kind = 'run_ended'"
        is_over = self._database.execute(ended, (int(facts["first_event"]),)).fetchone() is not None
        return None if is_over else (facts["version"], facts["wire"])

    def read(self, newest_steps: int = STEPS_READ) -> Past | None:
        """The run that did not end, with so many of its newest steps; None if there is none.

        Raises:
            FleetError: the file is damaged, or an event is not of this version.
        """
        try:
            past = self._read(newest_steps)
            if past is not None and self._steps is not None and (count := self._steps.catch_up(self._newest_steps())):
                self._say(f"{count} steps that {self._steps.path} lacked were added to it")
            return past
        except (sqlite3.Error, ValueError, KeyError) as error:
            first_line = str(error).splitlines()[0]
            raise FleetError(
                f"{self._path} is damaged, or was written by another version of Varuna ({first_line}). Move "
                f"{FILE}* out of the folder and start the same command again: machines then join again with new "
                "tokens, and the run continues from its newest checkpoint."
            ) from error

    def _read(self, newest_steps: int) -> Past | None:
        facts: dict[str, str] = dict(self._database.execute("SELECT name, body FROM facts"))
        if "run" not in facts:
            return None
        bodies = _bodies_that_count(self._database, int(facts["first_event"]), newest_steps)
        events = tuple(_event.validate_json(body) for body in bodies)
        if any(isinstance(event, RunEnded) for event in events):
            return None
        return Past(
            run=facts["run"],
            job=JobFacts.model_validate_json(facts["job"]) if "job" in facts else None,
            version=facts.get("version", ""),
            vote=Vote.model_validate_json(facts["vote"]) if "vote" in facts else None,
            events=events,
        )

    def close(self) -> None:
        """Write what still waits for a place, if there is one now, and close the files."""
        if self._rows:
            self._attempt_with_reserve()
        self._reserve.give_up()
        self._database.close()
        if self._steps is not None and (left := self._steps.close()):
            self._say(f"{left} steps could not be written into {self._steps.path}: they are in {self._path} alone")

    def _newest_steps(self) -> Iterator[tuple[float, StepRecorded]]:
        """Steps of the run, the newest first."""
        (first,) = self._database.execute("SELECT body FROM facts WHERE name = 'first_event'").fetchone()
        rows = self._database.execute(
            "SELECT time, body FROM events WHERE id > ? AND kind = 'step_recorded' ORDER BY id DESC", (int(first),)
        )
        for time_s, body in rows:
            yield time_s, StepRecorded.model_validate_json(body)

    def _keep(self, name: str, body: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts (name, body) VALUES (?, ?)", (name, body))

    def _newest(self) -> int:
        newest: int = self._database.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()[0]
        return newest


def _is_full(error: sqlite3.Error) -> bool:
    """Whether a disk without room may be the reason; SQLite calls some cases of it an I/O error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _bodies_that_count(database: sqlite3.Connection, after: int, newest_steps: int) -> list[str]:
    """Select what a manager that starts again must know: a million steps would take it half a minute and gigabytes.

    Steps that are neither among the newest nor the first of a generation are left out, and all audits.
    """
    newest = database.execute(
        "SELECT id FROM events WHERE id > ? AND kind = 'step_recorded' ORDER BY id DESC LIMIT 1 OFFSET ?",
        (after, newest_steps),
    ).fetchone()
    rows = database.execute(
        """
        SELECT body FROM events WHERE id > :after AND kind != 'audited' AND (
            kind != 'step_recorded' OR id > :newest OR id IN (
                SELECT (SELECT s.id FROM events s WHERE s.id > g.id AND s.kind = 'step_recorded' ORDER BY s.id LIMIT 1)
                FROM events g WHERE g.id > :after AND g.kind = 'generation_started'
            )
        ) ORDER BY id
        """,
        {"after": after, "newest": newest[0] if newest is not None else after},
    )
    return [body for (body,) in rows]
