"""Event-driven simulation of one step of one pipeline (paper §"Parametrized Simulation").

Every decision is the policy's own. A message's arrival is known as soon as its sender starts, so that the
only events are "stage k may act now".
"""

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from varuna.schedule.actions import Kind
from varuna.schedule.policy import Policy, make_policy, stash_limit
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, mean_travel_s, travel_times_s
from varuna.simulator.trace import Row, StepTrace

_FORWARD = Kind.FORWARD  # enum members are looked up slowly


def simulate(
    costs: PipelineCosts,
    *,
    micro_batches: int,
    policy: str = "varuna",
    stash_limits: Sequence[int] | None = None,
    split_last: int = 0,
    seed: int | None = None,
) -> StepTrace:
    """Simulate one step of a pipeline with the policy that the engine would run.

    Args:
        costs: of stages and links.
        micro_batches: N of this replica.
        policy: one of ``varuna.schedule.policy.POLICIES``.
        stash_limits: in-flight depth n_k, by stage; the policy's defaults if None.
        split_last: how many of the last backwards run as I and W.
        seed: of the links' jitter; None: every message is delayed by its mean. A message's delay depends on the
            seed, its link and its number only, so that policies are compared under the same delays.

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
        pipeline.append(_Stage(k, chosen, stage))
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
        "ends_s",
        "forwards",
        "gradients",
        "gradients_in",
        "idle",
        "index",
        "keeps_differ",
        "kinds",
        "policy",
        "record_s",
        "starts_s",
        "work",
    )

    def __init__(self, index: int, policy: Policy, costs: StageCosts) -> None:
        self.index = index
        self.policy = policy
        self.activations: list[float] = []
        """arrival times, ascending, known ahead"""
        self.gradients: list[float] = []
        self.activations_in = self.gradients_in = 0  # how many of them are here
        self.busy_until_s = 0.0
        self.idle = False
        self.record_s = costs.record_s
        self.keeps_differ = costs.record_s != costs.forward_s  # an F that keeps everything takes longer
        self.forwards = 0
        self.work: dict[Kind, tuple[float, _Channel | None]] = {}
        """how long a kind of action takes, and where its result goes"""
        self.kinds: list[Kind] = []
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []

    @property
    def row(self) -> Row:
        """The actions that this stage ran, with their times."""
        return Row(self.index, self.policy.backward_order, self.kinds, self.starts_s, self.ends_s)


class _Channel:
    """A directed FIFO link."""

    __slots__ = ("arrivals", "delay_s", "delays_s", "free_s", "last_s", "receiver", "serialisation_s")

    def __init__(
        self,
        receiver: _Stage,
        arrivals: list[float],
        serialisation_s: float,
        link: LinkCosts,
        delays_s: list[float] | None,
    ) -> None:
        self.receiver = receiver
        self.arrivals = arrivals
        self.serialisation_s = serialisation_s
        self.delay_s = mean_travel_s(link)
        self.delays_s = None if delays_s is None else iter(delays_s)
        self.free_s = self.last_s = 0.0

    def send(self, ready_s: float) -> float:
        """Put a message on the link as soon as it is ready and the link is free; returns its arrival in seconds."""
        free_s = self.free_s
        if ready_s > free_s:
            free_s = ready_s
        self.free_s = free_s = free_s + self.serialisation_s
        if self.delays_s is None:
            arrival_s = free_s + self.delay_s
        else:
            arrival_s = free_s + next(self.delays_s)
            if arrival_s < self.last_s:  # messages of a link stay in order
                arrival_s = self.last_s
            self.last_s = arrival_s
        self.arrivals.append(arrival_s)
        return arrival_s


def _connect(pipeline: list[_Stage], costs: PipelineCosts, micro_batches: int, seed: int | None) -> None:
    """Set how long each action takes and where its result goes."""

    def weather(link: LinkCosts, name: str) -> list[float] | None:
        return None if seed is None else travel_times_s(link, micro_batches, random.Random(f"{seed} {name}"))

    for k, (stage, stage_costs) in enumerate(zip(pipeline, costs.stages, strict=True)):
        downstream = upstream = None
        if k + 1 < len(pipeline):
            link, receiver = costs.links[k], pipeline[k + 1]
            downstream = _Channel(receiver, receiver.activations, link.activation_s, link, weather(link, f"{k} down"))
        else:  # the loss's gradients are there from the start, like the dataset's inputs
            stage.gradients, stage.gradients_in = [0.0] * micro_batches, micro_batches
        if k:
            link, receiver = costs.links[k - 1], pipeline[k - 1]
            upstream = _Channel(receiver, receiver.gradients, link.gradient_s, link, weather(link, f"{k} up"))
        else:
            stage.activations, stage.activations_in = [0.0] * micro_batches, micro_batches
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
        activations, activations_in, count = stage.activations, stage.activations_in, len(stage.activations)
        while activations_in < count and activations[activations_in] <= now_s:
            activations_in += 1
        stage.activations_in = activations_in
        gradients, gradients_in, count = stage.gradients, stage.gradients_in, len(stage.gradients)
        while gradients_in < count and gradients[gradients_in] <= now_s:
            gradients_in += 1
        stage.gradients_in = gradients_in
        policy = stage.policy
        kind = policy.choose(activations_in, gradients_in)
        if kind is None:
            stage.idle = True
            heappop(events)
            if activations_in < len(activations):
                heappush(events, (activations[activations_in], index, stage))
            if gradients_in < count:
                heappush(events, (gradients[gradients_in], index, stage))
            continue
        stage.idle = False
        seconds, channel = stage.work[kind]
        if kind is _FORWARD:
            if stage.keeps_differ and policy.keeps(stage.forwards):
                seconds = stage.record_s
            stage.forwards += 1
        policy.count(kind)  # nobody asks it again before the end
        end_s = stage.busy_until_s = now_s + seconds
        stage.kinds.append(kind)
        stage.starts_s.append(now_s)
        stage.ends_s.append(end_s)
        heapreplace(events, (end_s, index, stage))
        if channel is not None:
            arrival_s = channel.send(end_s)
            receiver = channel.receiver
            if receiver.idle:
                heappush(events, (arrival_s, receiver.index, receiver))


def _reduced_s(costs: PipelineCosts, ends_s: Sequence[float]) -> list[float]:
    """When each stage has its gradients summed: its all-reduce starts at its own end, tied ones wait for the last."""
    reduced_s = [end_s + stage.allreduce_s for end_s, stage in zip(ends_s, costs.stages, strict=True)]
    for tied in costs.tied:
        exchanged_s = max(reduced_s[k] for k in tied.stages) + tied.exchange_s
        for k in tied.stages:
            reduced_s[k] = exchanged_s
    return reduced_s
