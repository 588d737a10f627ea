"""Event-driven simulation of one step of one pipeline (paper §"Parametrized Simulation").

Every decision is the policy's own. A message's arrival is known as soon as its sender starts, so that the
only events are "stage k may act now".
"""

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from varuna.schedule.actions import Action, Kind
from varuna.schedule.policy import Policy, make_policy, stash_limit
from varuna.simulator.costs import PipelineCosts, travel_times_s
from varuna.simulator.trace import Row, StepTrace


def simulate(
    costs: PipelineCosts,
    *,
    micro_batches: int,
    policy: str = "varuna",
    stash_limits: Sequence[int] | None = None,
    split_last: int = 0,
    seed: int | None = None,
) -> StepTrace:
    """Run one step.

    Args:
        costs: of stages and links.
        micro_batches: N of this replica.
        policy: one of ``varuna.schedule.policy.POLICIES``.
        stash_limits: in-flight depth n_k, by stage; the policy's defaults if None.
        split_last: how many of the last backwards run as I and W.
        seed: of the links' jitter; None: every message is delayed by its mean. A message's delay depends on the
            seed, its link and its number only, so that policies can be compared under the same weather.

    Raises:
        UsageError: unknown policy, or limits that it cannot keep.
    """
    count = len(costs.stages)
    limits = stash_limits or [stash_limit(count, k, micro_batches, policy) for k in range(count)]
    pipeline = []
    for k, (stage, limit) in enumerate(zip(costs.stages, limits, strict=True)):
        chosen = make_policy(
            policy,
            stage=k,
            stages=count,
            micro_batches=micro_batches,
            stash_limit=limit,
            split_last=split_last,
            keeps_all=stage.keeps_all,
        )
        pipeline.append(_Stage(k, chosen))
    _connect(pipeline, costs, micro_batches, seed)
    _run(pipeline)
    for stuck in pipeline:
        if not stuck.policy.finished:
            raise RuntimeError(
                f"the simulated pipeline is stuck: stage {stuck.index} waits for {stuck.policy.awaited()}"
            )
    reduced_s = _reduced_s(costs, [stage.busy_until_s for stage in pipeline])
    return StepTrace(
        step_s=max(reduced_s) + costs.optimizer_s,
        reduced_s=tuple(reduced_s),
        costs=costs,
        rows=tuple(stage.row for stage in pipeline),
    )


class _Stage:
    """One stage's policy, what has been sent to it, and its history."""

    __slots__ = (
        "activations",
        "activations_in",
        "busy_until_s",
        "gradients",
        "gradients_in",
        "idle",
        "index",
        "policy",
        "record_s",
        "recording",
        "row",
        "work",
    )

    def __init__(self, index: int, policy: Policy) -> None:
        self.index = index
        self.policy = policy
        self.activations: list[float] = []
        """arrival times, ascending, known ahead"""
        self.gradients: list[float] = []
        self.activations_in = self.gradients_in = 0  # how many of them are here
        self.busy_until_s = 0.0
        self.idle = False
        self.record_s = 0.0
        self.recording = False  # the action under way is an F that keeps everything
        self.work: dict[Kind, tuple[float, _Channel | None]] = {}
        """how long a kind of action takes, and where its result goes"""
        self.row = Row(index)


class _Channel:
    """A directed FIFO link."""

    __slots__ = ("arrivals", "free_s", "last_s", "receiver", "serialisation_s", "travel_s")

    def __init__(self, receiver: _Stage, arrivals: list[float], serialisation_s: float, travel_s: list[float]) -> None:
        self.receiver = receiver
        self.arrivals = arrivals
        self.serialisation_s = serialisation_s
        self.travel_s = iter(travel_s)
        self.free_s = self.last_s = 0.0

    def send(self, ready_s: float) -> float:
        """Put a message on the link as soon as it is ready and the link free; returns its arrival."""
        free_s = self.free_s
        self.free_s = free_s = (ready_s if ready_s > free_s else free_s) + self.serialisation_s
        arrival_s = free_s + next(self.travel_s)
        if arrival_s < self.last_s:  # messages of a link stay in order
            arrival_s = self.last_s
        self.last_s = arrival_s
        self.arrivals.append(arrival_s)
        return arrival_s


def _connect(pipeline: list[_Stage], costs: PipelineCosts, micro_batches: int, seed: int | None) -> None:
    """Say what each action takes and to whom its result goes."""
    for k, (stage, stage_costs) in enumerate(zip(pipeline, costs.stages, strict=True)):
        downstream = upstream = None
        if k + 1 < len(pipeline):
            link, receiver = costs.links[k], pipeline[k + 1]
            travel_s = travel_times_s(link, micro_batches, None if seed is None else random.Random(f"{seed} {k} down"))
            downstream = _Channel(receiver, receiver.activations, link.activation_s, travel_s)
        else:  # the loss's gradients are there from the start, like the dataset's inputs
            stage.gradients, stage.gradients_in = [0.0] * micro_batches, micro_batches
        if k:
            link, receiver = costs.links[k - 1], pipeline[k - 1]
            travel_s = travel_times_s(link, micro_batches, None if seed is None else random.Random(f"{seed} {k} up"))
            upstream = _Channel(receiver, receiver.gradients, link.gradient_s, travel_s)
        else:
            stage.activations, stage.activations_in = [0.0] * micro_batches, micro_batches
        stage.record_s = stage_costs.record_s
        stage.work = {
            Kind.FORWARD: (stage_costs.forward_s, downstream),
            Kind.RECOMPUTE: (stage_costs.recompute_s, None),
            Kind.BACKWARD: (stage_costs.backward_s, upstream),
            Kind.INPUT: (stage_costs.input_s, upstream),
            Kind.WEIGHT: (stage_costs.weight_s, None),
        }


def _run(pipeline: list[_Stage]) -> None:
    """Let stages act until nothing happens any more."""
    events = [(0.0, stage.index, stage) for stage in pipeline]
    heapify(events)
    while events:
        now_s, index, stage = events[0]
        if stage.busy_until_s > now_s:
            heappop(events)
            continue
        action = _next(stage, now_s)
        if action is None:
            heappop(events)
            for arrivals, seen in ((stage.activations, stage.activations_in), (stage.gradients, stage.gradients_in)):
                if seen < len(arrivals):
                    heappush(events, (arrivals[seen], index, stage))
            continue
        _, kind, micro_batch = action
        seconds, channel = stage.work[kind]
        if stage.recording:
            seconds = stage.record_s
        end_s = stage.busy_until_s = now_s + seconds
        row = stage.row
        row.kinds.append(kind)
        row.micro_batches.append(micro_batch)
        row.starts_s.append(now_s)
        row.ends_s.append(end_s)
        heapreplace(events, (end_s, index, stage))
        if channel is not None:
            arrival_s = channel.send(end_s)
            receiver = channel.receiver
            if receiver.idle:
                heappush(events, (arrival_s, receiver.index, receiver))


def _next(stage: _Stage, now_s: float) -> Action | None:
    """What the policy makes of the messages that are here; None leaves the stage idle."""
    arrivals, seen = stage.activations, stage.activations_in
    while seen < len(arrivals) and arrivals[seen] <= now_s:
        seen += 1
    stage.activations_in = activations_in = seen
    arrivals, seen = stage.gradients, stage.gradients_in
    while seen < len(arrivals) and arrivals[seen] <= now_s:
        seen += 1
    stage.gradients_in = seen
    action = stage.policy.next(activations_in, seen)
    if action is None:
        stage.idle = True
    else:
        stage.idle = False
        stage.recording = action.kind is Kind.FORWARD and stage.policy.keeps(action.micro_batch)
        stage.policy.done(action)  # nobody asks it again before the end
    return action


def _reduced_s(costs: PipelineCosts, ends_s: Sequence[float]) -> list[float]:
    """When each stage has its gradients summed: its all-reduce starts at its own end, tied ones wait for the last."""
    reduced_s = [end_s + stage.allreduce_s for end_s, stage in zip(ends_s, costs.stages, strict=True)]
    for tied in costs.tied:
        exchanged_s = max(reduced_s[k] for k in tied.stages) + tied.exchange_s
        for k in tied.stages:
            reduced_s[k] = exchanged_s
    return reduced_s
