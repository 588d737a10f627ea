"""Event-driven simulation of one step of one pipeline (paper §"Parametrized Simulation").

Every decision is the policy's own. A message's arrival is known as soon as its sender starts, so that the
only events are "stage k may act now".
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from varuna.schedule.actions import Action, Kind, Orders
from varuna.schedule.policy import make_policy, stash_limit
from varuna.schedule.validate import Usage, usage
from varuna.simulator.costs import LinkCosts, PipelineCosts


class Executed(NamedTuple):
    """An action and when it ran, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What happened in a simulated step."""

    step_s: float
    """Start to end of the optimizer step."""
    timeline: tuple[tuple[Executed, ...], ...]
    """Executed actions, by stage."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the stages, in [0, 1), from the start to the last B of the pipeline."""
        span = len(self.timeline) * max(row[-1].end_s for row in self.timeline)
        busy = sum(entry.end_s - entry.start_s for row in self.timeline for entry in row)
        return max(0.0, 1.0 - busy / span) if span else 0.0

    @property
    def orders(self) -> Orders:
        """The executed actions without their times: what the validator checks."""
        return tuple(tuple(entry.action for entry in row) for row in self.timeline)

    @property
    def usage(self) -> tuple[Usage, ...]:
        """Peaks of stash and live activation sets, by stage."""
        return tuple(usage(row) for row in self.orders)


def simulate(
    costs: PipelineCosts,
    *,
    micro_batches: int,
    policy: str = "varuna",
    stash_limits: Sequence[int] | None = None,
    jitter_s: float = 0.0,
    seed: int = 0,
) -> StepTrace:
    """Run one step.

    Args:
        costs: of stages and links.
        micro_batches: N of this replica.
        policy: one of ``varuna.schedule.policy.POLICIES``.
        stash_limits: in-flight depth n_k, by stage; the policy's defaults if None.
        jitter_s: mean of the exponential delay added to every message; messages of a link stay in order.
        seed: of the jitter.

    Raises:
        UsageError: unknown policy, or limits that it cannot keep.
    """
    count = len(costs.stages)
    limits = stash_limits or [stash_limit(count, k, micro_batches, policy) for k in range(count)]
    pipeline = [_Stage(k, costs, policy, micro_batches, limits[k]) for k in range(count)]
    _run(pipeline, random.Random(seed), jitter_s)
    for stage in pipeline:
        if not stage.policy.finished:
            raise RuntimeError(
                f"the simulated pipeline is stuck: stage {stage.index} waits for {stage.policy.awaited()}"
            )
    ends = (stage.busy_until_s + stage.costs.allreduce_s for stage in pipeline)
    return StepTrace(
        step_s=max(ends) + costs.optimizer_s,
        timeline=tuple(tuple(stage.timeline) for stage in pipeline),
    )


class _Inbox:
    """The receiving end of a directed FIFO link: arrival times, ascending, known ahead."""

    __slots__ = ("arrivals", "free_s", "latency_s", "seen", "serialisation_s")

    def __init__(self, arrivals: list[float], link: LinkCosts, serialisation_s: float) -> None:
        self.arrivals = arrivals
        self.latency_s = link.latency_s
        self.serialisation_s = serialisation_s
        self.seen = 0
        self.free_s = 0.0

    def send(self, now_s: float, delay_s: float) -> float:
        """Put a message that is ready at ``now_s`` on the link; returns its arrival."""
        self.free_s = max(self.free_s, now_s) + self.serialisation_s
        arrival_s = self.free_s + self.latency_s + delay_s
        if self.arrivals and arrival_s < self.arrivals[-1]:
            arrival_s = self.arrivals[-1]
        self.arrivals.append(arrival_s)
        return arrival_s

    def count(self, now_s: float) -> int:
        """Messages here by ``now_s``, which never goes back."""
        arrivals, seen = self.arrivals, self.seen
        while seen < len(arrivals) and arrivals[seen] <= now_s:
            seen += 1
        self.seen = seen
        return seen


class _Stage:
    """One stage's policy, inboxes and history."""

    __slots__ = ("activations", "busy_until_s", "costs", "gradients", "idle", "index", "policy", "seconds", "timeline")

    def __init__(self, index: int, pipeline: PipelineCosts, policy: str, micro_batches: int, limit: int) -> None:
        count = len(pipeline.stages)
        self.index = index
        self.costs = pipeline.stages[index]
        self.policy = make_policy(policy, stage=index, stages=count, micro_batches=micro_batches, stash_limit=limit)
        self.seconds = {
            Kind.FORWARD: self.costs.forward_s,
            Kind.RECOMPUTE: self.costs.recompute_s,
            Kind.BACKWARD: self.costs.backward_s,
        }
        # The dataset's inputs and the loss's gradients are there from the start.
        self.activations = self.gradients = _Inbox([0.0] * micro_batches, LinkCosts(), 0.0)
        if index:
            link = pipeline.links[index - 1]
            self.activations = _Inbox([], link, link.activation_s)
        if index < count - 1:
            link = pipeline.links[index]
            self.gradients = _Inbox([], link, link.gradient_s)
        self.busy_until_s = 0.0
        self.idle = False
        self.timeline: list[Executed] = []

    def start(self, now_s: float) -> Action | None:
        """Begin the action that the policy wants, if any."""
        action = self.policy.next(self.activations.count(now_s), self.gradients.count(now_s))
        if action is None:
            self.idle = True
            return None
        self.policy.done(action)  # nobody asks it again before the end
        self.idle = False
        self.busy_until_s = now_s + self.seconds[action.kind]
        self.timeline.append(Executed(action, now_s, self.busy_until_s))
        return action


def _run(pipeline: list[_Stage], randomness: random.Random, jitter_s: float) -> None:
    """Let stages act until nothing happens any more."""
    events = [(0.0, k) for k in range(len(pipeline))]  # sorted: already a heap
    while events:
        now_s, k = heappop(events)
        stage = pipeline[k]
        if stage.busy_until_s > now_s or stage.policy.finished:
            continue
        action = stage.start(now_s)
        if action is None:
            for inbox in (stage.activations, stage.gradients):
                if inbox.seen < len(inbox.arrivals):
                    heappush(events, (inbox.arrivals[inbox.seen], k))
            continue
        heappush(events, (stage.busy_until_s, k))
        other = _receiver(pipeline, action)
        if other is None:
            continue
        inbox = other.activations if action.kind is Kind.FORWARD else other.gradients
        delay_s = randomness.expovariate(1.0 / jitter_s) if jitter_s else 0.0
        arrival_s = inbox.send(stage.busy_until_s, delay_s)
        if other.idle:
            heappush(events, (arrival_s, other.index))


def _receiver(pipeline: list[_Stage], action: Action) -> _Stage | None:
    """Who gets the result of an action, if anyone."""
    if action.kind is Kind.FORWARD and action.stage + 1 < len(pipeline):
        return pipeline[action.stage + 1]
    if action.kind is Kind.BACKWARD and action.stage:
        return pipeline[action.stage - 1]
    return None
