"""Events that can happen to a fleet: the inputs of ``machine.advance``."""

from dataclasses import dataclass

from varuna.core.messages import FromWorker
from varuna.core.node_notices import NodeNotice
from varuna.fleet.state.questions import Answer, Question
from varuna.fleet.state.requests import MORPH_REQUESTED


@dataclass(frozen=True, slots=True)
class WorkerSpawned:
    """A process was started for ``worker`` on ``node``, the VM that it lives and dies with."""

    worker: str
    node: str = "local"


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """``worker`` sent a message."""

    worker: str
    message: FromWorker


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process of ``worker`` ended; a negative ``code`` is the signal that killed it."""

    worker: str
    code: int
    stderr_tail: str = ""
    is_oom: bool = False
    """Its system killed it because memory was short."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection of ``worker`` ended; everything that it had sent came before this."""

    worker: str


@dataclass(frozen=True, slots=True)
class Heard:
    """Agents of ``nodes`` said something; of their workers, ``workers`` live, and do what their last beats said."""

    nodes: tuple[str, ...]
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeParted:
    """The connection to the agent of ``node`` ended, and there was no new one in a moment."""

    node: str
    abruptly: bool = False
    """From its side and without a goodbye: as a system ends the connections of a process that has ended."""


@dataclass(frozen=True, slots=True)
class WorkerDistrusted:
    """``worker`` said something that cannot be true."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class SpawnRequested:
    """Someone wants ``count`` workers more."""

    count: int


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """``node`` has a notice about its place or future."""

    node: str
    notice: NodeNotice


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants ``node`` back; there is no hurry."""

    node: str


@dataclass(frozen=True, slots=True)
class MorphRequested:
    """An operator, or what steps take, asks for the best plan for the current workers, whatever the switch costs."""

    why: str = MORPH_REQUESTED


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """An operator wants a checkpoint after the current step, and not only when the next one is due."""


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """An operator wants the run to end after the current step, with a checkpoint if it keeps any."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Someone wants the run to end now."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """A checkpoint of ``step`` steps is committed, and the newest one."""

    step: int


@dataclass(frozen=True, slots=True)
class AnswerReceived:
    """The answer to the question with this ``number``."""

    question: Question
    number: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Recalibrated:
    """The calibration has become better while ``generation`` runs, and with it the expected times of its stages."""

    generation: int
    expected_s: tuple[float, ...] | None
    link_bytes_per_s: float | None = None
    """Between two machines."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; for the last ``deaf_s`` of it nobody could be heard, since the server's event loop stood still."""

    deaf_s: float = 0.0


Event = (
    WorkerSpawned
    | MessageReceived
    | WorkerExited
    | ConnectionLost
    | Heard
    | NodeParted
    | WorkerDistrusted
    | SpawnRequested
    | NoticeReceived
    | DrainRequested
    | MorphRequested
    | SaveRequested
    | FinishRequested
    | StopRequested
    | CheckpointCompleted
    | AnswerReceived
    | Recalibrated
    | Tick
)
