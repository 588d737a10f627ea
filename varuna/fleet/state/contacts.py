"""Contacts with machines: who was heard, and when, on a clock that stands still while nobody could have been."""

from dataclasses import dataclass, field

from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.phases import Idle, Phase
from varuna.fleet.state.worker import changed


@dataclass(frozen=True, slots=True)
class NodeContact:
    """The manager's contact with a machine."""

    heard_s: float
    """Time at which it was heard, on the clock for silence."""
    parted_after: int | None = None
    """Its connection ended when this many steps had shown that their ranks live; see ``Fleet.is_parted``."""
    ended: bool = False
    """So did its agent, by all that its system said; workers end with their agent."""
    told: bool = False
    """People know that it is out of sight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachabilityScan:
    """A look at the machines that are out of sight, after which nothing needs to be done about them for a while."""

    until_s: float = float("-inf")
    """On the clock for silence; before that, only in another phase or generation."""
    generation: int = -1
    phase: type[Phase] = Idle


@dataclass(frozen=True, kw_only=True)
class Contacts:
    """Contacts with machines, which ``fleet.machine.leases`` keeps."""

    ticked_s: float
    """Time of the newest tick."""
    heard_s: float
    """Time at which anybody was heard last."""
    listened_s: float
    """The clock for silence: it stands still while this manager could not have heard anybody."""
    is_alone: bool = False
    """Nobody at all is heard, of an elastic fleet."""
    isolation_reported: bool = False
    """People know that."""
    regained_s: float = float("-inf")
    """Time at which the newest silence of all ended, on the clock for silence."""
    nodes: PersistentMap[NodeContact] = field(default_factory=PersistentMap)
    """By machine, of an elastic fleet."""
    nearest_s: float = float("-inf")
    """Time at which a machine was heard last, on the clock for silence."""
    hidden: PersistentMap[None] = field(default_factory=PersistentMap)
    """Machines that were out of sight when all were looked at, and have not been heard since."""
    looked: ReachabilityScan = field(default_factory=ReachabilityScan)
    """The last look at what is out of sight."""
    hiding_s: float = float("-inf")
    """Until then, on the clock for silence, no other machine can get out of sight."""
    progressed_s: float = float("-inf")
    """Time of this generation's newest commit, which proves that all its ranks live; on the clock for silence."""
    progresses: int = 0
    """Number of such proofs."""
    expiring_s: float = float("-inf")
    """Until then no worker's time is up, but for those of ``watched``."""
    watched: frozenset[str] = frozenset()
    """Workers that ended, or lost their connection, or were silent while their machine was heard."""

    def without(self, node: str) -> "Contacts":
        """These, without a machine that has no workers any more."""
        return changed(self, nodes=self.nodes.without(node), hidden=self.hidden.without(node))

    def watching(self, names: frozenset[str]) -> "Contacts":
        """These, with other workers to look at at each tick."""
        return changed(self, watched=names)

    def expiring(self, due_s: float) -> "Contacts":
        """These, with another time to look at all workers."""
        return changed(self, expiring_s=due_s)

    def unproved(self) -> "Contacts":
        """These, before the first commit of another generation."""
        return changed(self, progressed_s=float("-inf"))
