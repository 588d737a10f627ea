"""A trace: when nodes came and went. Several happenings of one instant are one change, in whatever order they stand."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from varuna.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that came or went at one instant. A node that is in both was replaced by another of its name."""

    at_s: float
    """Seconds since the start of the trace."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in time order; the first is at 0, and the trace ends at ``end_s``."""

    changes: tuple[Change, ...]
    end_s: float
    clock: str = "seconds"
    """Unit of the recording's times, or ``timestamps``, for people."""

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes at any time."""
        return max((count for _, _, count in self.spans()), default=0)

    def spans(self) -> list[tuple[float, float, int]]:
        """Begin, end and number of nodes of each stretch between changes."""
        spans, count = [], 0
        ends_s = [*(change.at_s for change in self.changes), self.end_s][1:]
        for change, end_s in zip(self.changes, ends_s, strict=True):
            count += len(change.added) - len(change.removed)
            spans.append((change.at_s, end_s, count))
        return spans


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that one line of a recording reports."""

    at_s: float
    """Seconds since the start of the trace."""
    node: str | None = None
    """The node that comes or goes; None where only a number is given."""
    comes: bool = True
    count: int = 0
    """Number of nodes from now on, if no node is named."""


def assembled(happenings: Sequence[Happening], end_s: float, clock: str) -> Trace:
    """Return the trace of what happened, in time order.

    Where only numbers of nodes are given, those that go are drawn by a fixed seed: a cloud does not ask which stage a
    VM runs. Of several numbers at one instant, the last one counts.

    Raises:
        UsageError: a node leaves that is not there, or comes twice, or more come at an instant than are counted.
    """
    alive: dict[str, None] = {}
    draw = random.Random(0)
    spent = 0
    changes: list[Change] = []
    for at_s, group in groupby(happenings, key=lambda happening: happening.at_s):
        told = list(group)
        counts = [each.count for each in told if each.node is None]
        added, removed = _named(at_s, (each for each in told if each.node is not None), alive)
        if counts:
            more = counts[-1] - len(alive) - len(added) + len(removed)
            fresh = [f"node{spent + i}" for i in range(more)]
            spent += len(fresh)
            added += fresh
            leaving = [node for node in alive if node not in removed]
            if -more > len(leaving):
                raise UsageError(
                    f"it counts {counts[-1]} nodes {at_s:g} s after its start, but names {len(added)} that come at "
                    "that instant. Count those that are named, too."
                )
            removed += draw.sample(leaving, max(0, -more))
        if added or removed or not changes:
            alive = {**{node: None for node in alive if node not in removed}, **dict.fromkeys(added)}
            changes.append(Change(at_s, tuple(added), tuple(removed)))
    return Trace(tuple(changes), end_s, clock)


def _named(at_s: float, told: Iterable[Happening], alive: dict[str, None]) -> tuple[list[str], list[str]]:
    """Return the nodes added and removed at one instant: recorders write an instant's lines in any order."""
    comings: dict[str, list[bool]] = {}
    for each in told:
        assert each.node is not None
        comings.setdefault(each.node, []).append(each.comes)
    added, removed = [], []
    for node, ways in comings.items():
        before, more = node in alive, 2 * sum(ways) - len(ways)
        if before + more not in (0, 1):
            if more > 0:
                raise UsageError(
                    f"it adds {node} twice, {at_s:g} s after its start. Let it leave before it comes again."
                )
            raise UsageError(f"it removes {node}, which is not there, {at_s:g} s after its start. Add it first.")
        if before and False in ways:
            removed.append(node)
        if (before + more) and True in ways:
            added.append(node)
    return added, removed
