"""What can happen to a fleet: the inputs of ``machine.advance``."""

from dataclasses import dataclass

from varuna.core.messages import FromWorker


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    """A process was started for ``worker``."""

    worker: str


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """``worker`` said something."""

    worker: str
    message: FromWorker


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process of ``worker`` ended; a negative ``code`` is the signal that killed it."""

    worker: str
    code: int
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection of ``worker`` ended; everything that it had sent came before this."""

    worker: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SpawnRequested:
    """Someone wants ``count`` workers more."""

    count: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone wants the run to end now."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = WorkerSpawned | MessageReceived | WorkerExited | ConnectionLost | SpawnRequested | StopRequested | Tick
