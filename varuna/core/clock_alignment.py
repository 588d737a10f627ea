"""The clocks of several machines brought together by the messages of one step: nothing arrives before it was sent.

A message that machine A sent at 10.0 s and B had at 12.3 s, each by its own clock, says that A's clock is at most 2.3 s
behind B's. A message the other way bounds it from the other side. The vote of a step is a message from each rank to
every other one. Bounds add up along chains of machines. The truth lies between the bounds, so half their distance is an
uncertainty, and not a guess.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.core.times import RankTimeline, StepTimeline

NEEDS = {"activation": "F", "gradient": "BI"}
"""Kinds of actions that make a message of a kind, and those that need it."""


class Alignment(NamedTuple):
    """Seconds to add to each clock, and the most by which a clock may be off then."""

    added_s: Mapping[str, float]
    uncertain_s: float
    """at most, for any clock; 0 if all ranks share one; infinite if nothing links some of them"""


class _Later(NamedTuple):
    """``second`` reads ``second_s`` when, or after, ``first`` read ``first_s``."""

    first: str
    first_s: float
    second: str
    second_s: float


def align(timeline: StepTimeline) -> Alignment:
    """Bring the clocks of a step's ranks together, by the clock of the first rank."""
    clocks = list(dict.fromkeys(rank.clock for rank in timeline.ranks))
    if len(clocks) < 2:
        return Alignment(dict.fromkeys(clocks, 0.0), 0.0)
    bounds: dict[tuple[str, str], float] = {}  # of what is added to the first, less what is added to the second
    for each in (*_messages(timeline), *_votes(timeline.ranks)):
        if each.first != each.second:
            pair, bound_s = (each.first, each.second), each.second_s - each.first_s
            bounds[pair] = min(bound_s, bounds.get(pair, math.inf))
    reference, zero_s = clocks[0], {rank.clock: rank.zero_s for rank in reversed(timeline.ranks)}
    most = _reach(bounds, reference, clocks)
    # Turned around, bounds are on what is subtracted: the most of that is the least that is added.
    least = {clock: -bound_s for clock, bound_s in _reach(_turned(bounds), reference, clocks).items()}
    added_s, uncertain_s = {}, 0.0
    for clock in clocks:
        low_s, high_s = least[clock], most[clock]
        if math.isfinite(low_s) and math.isfinite(high_s):
            added_s[clock] = (low_s + high_s) / 2
            uncertain_s = max(uncertain_s, abs(high_s - low_s) / 2)
        else:  # they began the step at about the same time
            added_s[clock], uncertain_s = zero_s[reference] - zero_s[clock], math.inf
    return Alignment(added_s, uncertain_s)


def _turned(bounds: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {(second, first): bound_s for (first, second), bound_s in bounds.items()}


def _reach(bounds: Mapping[tuple[str, str], float], reference: str, clocks: list[str]) -> dict[str, float]:
    """Find the tightest upper bound on what is added to each clock: the shortest chain of bounds to the reference."""
    found = dict.fromkeys(clocks, math.inf) | {reference: 0.0}
    # Bellman-Ford: the shortest path has at most as many edges as there are clocks.
    for _ in clocks:
        before = dict(found)
        for (first, second), bound_s in bounds.items():
            if first != reference:
                found[first] = min(found[first], found[second] + bound_s)
        if found == before:
            break
    return found


def _messages(timeline: StepTimeline) -> Iterable[_Later]:
    """Yield bounds of messages: each was sent before the rank that waited for it began to use it."""
    plan, ranks = timeline.plan, {rank.rank: rank for rank in timeline.ranks}
    waited_s = {number: _began_after_wait(rank) for number, rank in ranks.items()}
    for number, sender in ranks.items():
        for sent in sender.sent:
            if (to := receiver_of(plan, number, sent.kind)) not in ranks:
                continue
            receiver = ranks[to]
            for kind in NEEDS[sent.kind]:
                if (begin_s := waited_s[to].get((kind, sent.micro_batch))) is not None:
                    sent_s = sender.zero_s + sent.begin_s
                    yield _Later(sender.clock, sent_s, receiver.clock, receiver.zero_s + begin_s)


def receiver_of(plan: Plan, rank: int, kind: str) -> int:
    """Return the rank that a message goes to: activations go to the next stage, gradients to the previous one."""
    replica, stage = plan.place_of(rank)
    return plan.rank_of(replica, stage + 1 if kind == "activation" else stage - 1)


def _began_after_wait(rank: RankTimeline) -> dict[tuple[str, int], float]:
    """Return when each action began for which the rank had waited to the very moment."""
    # Only these began because a message came; others may have had theirs for long.
    ended_s = {wait.end_s for wait in rank.waits}
    return {(did.kind, did.micro_batch): did.begin_s for did in rank.actions if did.begin_s in ended_s}


def _votes(ranks: Iterable[RankTimeline]) -> Iterable[_Later]:
    """Yield bounds of votes: no rank has the sum before every rank has cast its own; the closest ones count."""
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    for rank in ranks:
        for end in rank.ends:
            if end.kind == "vote":
                begun[rank.clock] = max(begun.get(rank.clock, -math.inf), rank.zero_s + end.begin_s)
                ended[rank.clock] = min(ended.get(rank.clock, math.inf), rank.zero_s + end.end_s)
    for first, first_s in begun.items():
        for second, second_s in ended.items():
            yield _Later(first, first_s, second, second_s)


def in_words(alignment: Alignment) -> str:
    """Say how far times of different ranks can be compared."""
    clocks = len(alignment.added_s)
    if clocks < 2:
        return "All ranks share one clock."
    if math.isinf(alignment.uncertain_s):
        return f"The clocks of {clocks} machines could not be aligned: compare times within a machine only."
    off_ms = f"{alignment.uncertain_s * 1000:.2g} ms"
    return f"The clocks of {clocks} machines are aligned by the messages of this step, to within ±{off_ms}."
