"""Messages between a torchrun agent and the manager: a report a second by HTTP, and the answer to it."""

from typing import Annotated, Literal

from pydantic import Field

from varuna.core.value import Value

MAX_REASON = 1000
MAX_REPORT_BYTES = 256 * 2**10
MAX_NODES = 4096

NodeState = Literal["joins", "works", "finished", "failed", "departed"]
"""The last three are said once: its workers have ended well, or not, or this machine leaves."""
NodeName = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=MAX_REASON)]


class TorchrunReport(Value):
    """State of a node, with all that a manager must hear that knows nothing of its world."""

    version: str = Field(max_length=64)
    run_id: str = Field(max_length=256, description="--rdzv-id")
    least: int = Field(ge=1, description="nodes")
    most: int = Field(ge=1, description="nodes")
    state: NodeState
    world: int = Field(default=-1, ge=-1, description="number of the newest world that it has been in")
    members: tuple[NodeName, ...] = Field(default=(), max_length=MAX_NODES, description="nodes of that world, by rank")
    store: str = Field(default="", max_length=300, description="host:port of that world's store, in its first node")
    leaves: Text = Field(default="", description="why this machine will soon be taken away; empty if nothing is known")


class TorchrunAnswer(Value):
    """Orders of the manager for a node. With ``members``, the node is one of them."""

    world: int = -1
    members: tuple[NodeName, ...] = ()
    store: str = ""
    waiting: int = Field(default=0, ge=0, description="nodes for which this one has to stop its workers")
    says: str = Field(default="", description="what it waits for")
    is_spare: bool = Field(default=False, description="the world is full: it waits for as long as that lasts")
    over: str = Field(default="", description="why there is no further world for this node; empty while there may be")
    exit_code: int = 0
