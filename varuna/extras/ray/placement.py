"""Choice of the nodes of a Ray cluster that get an agent, also after one failed. Pure: time is an argument."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

_FIRST_PAUSE_S, _MOST_PAUSE_S = 2.0, 120.0
_STABLE_S = 120.0
_MOST_FAILURES = 4


@dataclass(frozen=True)
class Node:
    """A living node: how many workers fit on it, by its GPUs or CPUs, used or not."""

    id: str
    address: str
    fits: int
    is_head: bool = False


@dataclass(frozen=True)
class NodePlace:
    """An agent to start, with this many workers."""

    node: Node
    workers: int


def places(
    nodes: Iterable[Node], *, taken: Collection[str], avoided: Collection[str], missing: int, workers: int | None
) -> list[NodePlace]:
    """Return the agents to start now: one per node, the head last.

    Args:
        nodes: all that live.
        taken: nodes that have an agent of this run.
        avoided: nodes that get none.
        missing: agents, at most.
        workers: per agent; None: as many as fit.
    """
    free = [node for node in nodes if node.id not in taken and node.id not in avoided and node.fits >= (workers or 1)]
    free.sort(key=lambda node: (node.is_head, -node.fits, node.id))
    return [NodePlace(node, workers or node.fits) for node in free[: max(0, missing)]]


@dataclass
class _Past:
    failures: int = 0
    started_s: float = 0.0
    again_s: float = 0.0
    has_left: bool = False
    why: str = ""


@dataclass
class NodeHistory:
    """History of the agents on each node."""

    _nodes: dict[str, _Past] = field(default_factory=dict)

    def started(self, node: str, now_s: float) -> None:
        """Note that an agent starts."""
        self._of(node).started_s = now_s

    def ended(self, node: str, code: int | None, why: str, now_s: float) -> None:
        """Note that an agent ended: with 0 as it was told to leave; another code, or None (killed), is a failure."""
        past = self._of(node)
        if code == 0:
            past.has_left = True
            return
        past.failures = 1 if now_s > past.started_s + _STABLE_S else past.failures + 1
        past.again_s = now_s + min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (past.failures - 1))
        past.why = why

    def avoided(self, now_s: float) -> set[str]:
        """Return the nodes that get no agent now."""
        return {node for node, past in self._nodes.items() if past.has_left or now_s < past.again_s}

    def complaint(self, living: Collection[str]) -> str:
        """Return why agents fail again and again on some living node; empty if they do on none."""
        failing = [self._nodes[node] for node in living if node in self._nodes and self._nodes[node].failures > 1]
        return max(failing, key=lambda past: past.again_s).why if failing else ""

    def is_hopeless(self, capable: Collection[str]) -> bool:
        """Return whether agents have failed on every capable node too often for another try."""
        known = [self._nodes.get(node) for node in capable]
        return bool(known) and all(past is not None and past.failures >= _MOST_FAILURES for past in known)

    def _of(self, node: str) -> _Past:
        return self._nodes.setdefault(node, _Past())
