"""The run on disk: every event in the run's database, every committed step in the user's JSON log."""

import json
import sqlite3
import time
from pathlib import Path

from pydantic import TypeAdapter

from varuna.core.errors import UsageError
from varuna.core.messages import Vote
from varuna.core.model import JobFacts
from varuna.core.value import Value
from varuna.fleet.database import FILE, open_database
from varuna.fleet.story import GenerationStarted, RunEnded, RunEvent, StepRecorded, VerdictReached

_event: TypeAdapter[RunEvent] = TypeAdapter(RunEvent)


class Past(Value):
    """What a manager that starts again must know."""

    run: str
    job: JobFacts | None = None
    version: str = ""
    vote: Vote | None = None
    events: tuple[RunEvent, ...] = ()


class Journal:
    """A row per event; once ``append`` returns it survives the death of this process.

    What binds the future, a verdict or the number of a generation, survives a power cut too.

    Raises:
        FleetError: the database cannot be used.
        OSError: the JSON log cannot be written.
    """

    def __init__(self, run_dir: Path, json_log: Path | None) -> None:
        self._steps = json_log.open("a") if json_log is not None else None
        self._database = open_database(run_dir)

    def append(self, event: RunEvent, *, vote: Vote | None = None) -> None:
        """Write one event, and the newest vote with the step that it committed."""
        binds = isinstance(event, VerdictReached | GenerationStarted)
        if binds:
            self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute(
            "INSERT INTO events (time, kind, body) VALUES (?, ?, ?)", (time.time(), event.kind, event.model_dump_json())
        )
        if vote is not None:
            self._keep("vote", vote.model_dump_json())
        self._database.execute("COMMIT")
        if binds:
            self._database.execute("PRAGMA synchronous=NORMAL")
        if self._steps is not None and isinstance(event, StepRecorded):
            self._steps.write(json.dumps(_step_line(event)) + "\n")
            self._steps.flush()

    def begin(self, run: str) -> None:
        """A new run starts: what came before is history."""
        self._database.execute("BEGIN IMMEDIATE")
        for name in ("job", "version", "vote", "identity"):
            self._database.execute("DELETE FROM facts WHERE name = ?", (name,))
        self._keep("run", run)
        self._keep("first_event", str(self._newest()))
        self._database.execute("COMMIT")

    def keep_job(self, job: JobFacts, version: str) -> None:
        """What the run trains."""
        self._database.execute("BEGIN IMMEDIATE")
        self._keep("job", job.model_dump_json())
        self._keep("version", version)
        self._database.execute("COMMIT")

    def read(self) -> Past | None:
        """The run that did not end; None if there is none.

        Raises:
            ValueError: an event is not of this version.
        """
        facts: dict[str, str] = dict(self._database.execute("SELECT name, body FROM facts"))
        if "run" not in facts:
            return None
        events = tuple(_event.validate_json(body) for body in _bodies(self._database, int(facts["first_event"])))
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
        """Close the files."""
        self._database.close()
        if self._steps is not None:
            self._steps.close()

    def _keep(self, name: str, body: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts (name, body) VALUES (?, ?)", (name, body))

    def _newest(self) -> int:
        newest: int = self._database.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()[0]
        return newest


def read_events(run_dir: Path) -> list[RunEvent]:
    """All events that a run directory has seen, the oldest first; also while a manager writes.

    Raises:
        UsageError: there is no run, or it is another version's.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise UsageError(f"there is no run in {run_dir}: {FILE} is missing. Name the folder of a run.")
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0)
        try:
            return [_event.validate_json(body) for body in _bodies(database, 0)]
        finally:
            database.close()
    except (sqlite3.Error, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _bodies(database: sqlite3.Connection, after: int) -> list[str]:
    return [body for (body,) in database.execute("SELECT body FROM events WHERE id > ? ORDER BY id", (after,))]


def _step_line(event: StepRecorded) -> dict[str, object]:
    """A line of the JSON log; a loss that is no number is written as NaN."""
    plan = event.plan
    return {
        "step": event.step,
        "loss": event.loss,
        "generation": event.generation,
        "plan": {
            "stages": plan.stages,
            "replicas": plan.replicas,
            "micro_batch": plan.micro_batch,
            "micro_batches": plan.micro_batches,
        },
        "examples_per_s": event.examples_per_s,
        "wall_time": time.time(),
    }
