"""Messages between an agent and the manager: JSON, one frame per WebSocket message.

The first frame each way is ``Greet`` and ``Welcome``. Then come items, numbered and confirmed (see ``agent_session``),
and once a second a pulse, which the manager answers if it is asked to: so both sides notice a dead connection.
"""

import hashlib
import json
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from varuna.core.messages import Beat, FromWorker, Relay, ToWorker
from varuna.core.node_notices import NodeNotice
from varuna.core.value import Value
from varuna.fleet.net.beats import REMEMBERED
from varuna.fleet.net.host_facts import HostFacts

WORKER_NAME: Final = r"^[a-z0-9][a-z0-9.-]{0,63}$"
MAX_JOIN_BYTES: Final = 16 * 2**10
OUTPUT_CHUNK_BYTES: Final = 32 * 2**10
MAX_TAIL: Final = 256 * 2**10
"""Most characters of a worker's newest output."""
BAD_MESSAGE, BAD_JOB, STALLED, BAD_TWIN = 4400, 4403, 4408, 4409
"""Codes with which the manager closes an agent's connection."""

WorkerName = Annotated[str, Field(pattern=WORKER_NAME)]

# -- joining, by HTTP ---------------------------------------------------------------------------------


class JoinRequest(Value):
    """A machine wants to belong to the run."""

    token: str = Field(max_length=128)
    version: str = Field(max_length=64)
    hostname: str = Field(default="", max_length=255)
    secret_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the secret that the machine chose for itself")


class Joined(Value):
    """The answer: what the machine is called from now on."""

    node: WorkerName


class Identity(Value):
    """The identity of an agent, which it keeps when it starts again."""

    node: WorkerName
    secret: str = Field(max_length=128)


class JobIdentity(Value):
    """Facts on which all agents of a run must agree before they start a worker."""

    version: str = Field(max_length=64, description="of the package")
    script: str = Field(max_length=4096, description="file name, for people")
    script_sha256: str = Field(max_length=64)
    args_sha256: str = Field(max_length=64)


# -- agent to manager ---------------------------------------------------------------------------------


class Exited(Value):
    """The end of a process; a negative code is the signal that killed it."""

    code: int
    stderr_tail: str = Field(default="", max_length=MAX_TAIL)
    is_oom: bool = Field(default=False, description="its system killed it because memory was short")

    @classmethod
    def of(cls, code: int, stderr_tail: str, *, is_oom: bool = False) -> "Exited":
        """An exit with as much of the newest output as a message may have."""
        return cls(code=code, stderr_tail=stderr_tail[-MAX_TAIL:], is_oom=is_oom)


class WorkerSnapshot(Value):
    """A worker of this agent, with all that a manager must hear which does not know it."""

    worker: WorkerName
    said: tuple[FromWorker, ...] = ()
    generation: int = Field(default=-1, description="newest generation that it was assigned")
    exited: Exited | None = None


class Greet(Value):
    """First words on a new connection."""

    kind: Literal["greet"] = "greet"
    session: str = Field(max_length=64, description="one life of the agent's process")
    manager: str = Field(default="", max_length=64, description="life of the manager that it spoke with last")
    run: str = Field(default="", max_length=64, description="run that its workers belong to")
    job: JobIdentity
    received: int = Field(default=0, ge=0, description="newest item that it has from that manager")
    snapshots: tuple[WorkerSnapshot, ...] = Field(default=(), max_length=1024)
    relay: Relay | None = Field(
        default=None, description="this machine's port, where it joins others' connections, too"
    )


class Pulse(Value):
    """The newest beat of each worker that has one since the last pulse, once a second (see ``beats``)."""

    kind: Literal["pulse"] = "pulse"
    received: int = Field(ge=0)
    asks: bool = Field(default=True, description="for an answer: nothing was heard for a while, or items wait")
    beats: dict[WorkerName, Beat | None] = Field(
        default={}, max_length=REMEMBERED, description="None: as the one before, on this connection"
    )
    clock_s: float | None = Field(default=None, allow_inf_nan=False, description="this machine's, since 1970")
    host: HostFacts | None = Field(default=None, description="now and then, once there was a look")


class Started(Value):
    """A process was started."""

    kind: Literal["started"] = "started"
    worker: WorkerName


class Said(Value):
    """A worker said something that counts."""

    kind: Literal["said"] = "said"
    worker: WorkerName
    message: FromWorker


class Parted(Value):
    """The connection of a worker to its agent ended."""

    kind: Literal["parted"] = "parted"
    worker: WorkerName


class ProcessEnded(Value):
    """The process of a worker ended."""

    kind: Literal["ended"] = "ended"
    worker: WorkerName
    exited: Exited


Chunk = Annotated[bytes, Field(max_length=2 * OUTPUT_CHUNK_BYTES)]


class Output(Value):
    """A worker's output: bytes of its log file from ``offset`` on."""

    kind: Literal["output"] = "output"
    worker: WorkerName
    offset: int = Field(ge=0)
    data: Chunk


class Printed(Value):
    """Complete lines of the main worker's standard output, to show."""

    kind: Literal["printed"] = "printed"
    worker: WorkerName
    data: Chunk


UpBody = Annotated[
    Started | Said | Parted | ProcessEnded | Output | Printed | NodeNotice,
    Field(discriminator="kind"),
]


class UpItem(Value):
    """A numbered message to the manager."""

    kind: Literal["item"] = "item"
    number: int = Field(ge=1)
    received: int = Field(ge=0)
    body: UpBody


UpFrame = Annotated[UpItem | Pulse, Field(discriminator="kind")]

# -- manager to agent ---------------------------------------------------------------------------------


class Welcome(Value):
    """The answer to ``Greet``."""

    kind: Literal["welcome"] = "welcome"
    manager: str = Field(description="this life of the manager")
    run: str
    resumed: bool = Field(description="both sides go on where the last connection ended")
    received: int = Field(default=0, ge=0)
    kept: dict[WorkerName, int] = Field(default={}, description="bytes of each log that the manager has")


class PulseAnswer(Value):
    """The answer to a pulse that asks for one."""

    kind: Literal["answer"] = "answer"
    received: int = Field(ge=0)


class Tell(Value):
    """A message for a worker."""

    kind: Literal["tell"] = "tell"
    worker: WorkerName
    message: ToWorker


class End(Value):
    """Kill a worker: it is no longer part of the run."""

    kind: Literal["end"] = "end"
    worker: WorkerName
    rests: bool = Field(default=False, description="no other one follows in its place for a while")


class Dismiss(Value):
    """The run has left this machine: let the workers end, then end yourself with ``exit_code``."""

    kind: Literal["dismiss"] = "dismiss"
    reason: str
    exit_code: int
    drained: bool = Field(default=False, description="the run continues elsewhere: this agent's secret was revoked")


DownBody = Annotated[Tell | End | Dismiss, Field(discriminator="kind")]


class DownItem(Value):
    """A numbered message to an agent."""

    kind: Literal["item"] = "item"
    number: int = Field(ge=1)
    received: int = Field(ge=0)
    body: DownBody


DownFrame = Annotated[Welcome | DownItem | PulseAnswer, Field(discriminator="kind")]

greeting: TypeAdapter[Greet] = TypeAdapter(Greet)
up_frame: TypeAdapter[UpFrame] = TypeAdapter(UpFrame)
down_frame: TypeAdapter[DownFrame] = TypeAdapter(DownFrame)


@cache
def wire_digest() -> str:
    """A digest of all that managers, agents and workers may say to each other: two that differ are not understood."""
    return schema_digest(greeting, up_frame, down_frame)


def schema_digest(*adapters: TypeAdapter[Any]) -> str:
    """A digest of what values are made of, without the words that are for people."""
    schemas = [adapter.json_schema() for adapter in adapters]
    return hashlib.sha256(json.dumps(_bare(schemas), sort_keys=True).encode()).hexdigest()[:16]


def _bare(schema: object) -> object:
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if isinstance(schema, dict):
        return {
            key: _bare(value)
            for key, value in schema.items()
            if not (key in ("description", "title") and isinstance(value, str))
        }
    return schema
