"""Commands that the shell carries out, in order: the outputs of ``machine.advance``."""

from dataclasses import dataclass

from varuna.core.messages import ToWorker
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.saved import SavedShard
from varuna.fleet.state.questions import Question
from varuna.fleet.state.run_events import RunEvent


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to ``worker``."""

    worker: str
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Kill:
    """Make sure that the process of ``worker`` ends: it is no longer part of the run."""

    worker: str
    rests: bool = False
    """No other one follows on its machine for a while."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start ``count`` workers, and report each with ``WorkerSpawned``."""

    count: int
    avoided: tuple[str, ...] = ()
    """Workers whose GPUs must not be used."""


@dataclass(frozen=True, slots=True)
class Release:
    """The run has left ``node``: its workers were dismissed, and it needs no state of theirs any more."""

    node: str
    drained: bool
    """Somebody wanted it back: it may not return by itself."""


@dataclass(frozen=True, slots=True)
class Collect:
    """A shard of an unfinished checkpoint is durable."""

    shard: SavedShard


@dataclass(frozen=True, slots=True)
class Complain:
    """A checkpoint will lack the shard of ``worker``."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Append to the log, durably where ``event`` binds the future, before any later instruction; then show it."""

    event: RunEvent


@dataclass(frozen=True, slots=True)
class Ask:
    """Find this out where nobody waits for it, and report it with ``AnswerReceived``."""

    question: Question
    number: int
    job: JobFacts
    running: Plan | None
    """The plan of the newest generation."""


Instruction = Send | Kill | Spawn | Release | Collect | Complain | Publish | Ask
