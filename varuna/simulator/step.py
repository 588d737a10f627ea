r"""Event-driven simulation of one step of one pipeline (paper §"Parametrized Simulation").

    stage 0   F0   F1   F2 ...                  each stage asks its policy: an action, or wait
                \    \                           a message: after those before it on its channel, at the line's rate
    stage 1      F0   F1 ...       B0 ...       the last stage's B needs no message

Every decision is the policy's own. A message's arrival is known as soon as its sender starts, so that the only
events are "stage k may act now"; and, where links share the lines of hosts, "a message has left".
"""

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from varuna.schedule.actions import Kind
from varuna.schedule.policy import Policy, make_policy, stash_limit
from varuna.simulator.channels import Arrivals, SharedLink, busiest_line_s, lines_of
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, travel_times_s
from varuna.simulator.trace import Row, StepTrace

_FREE_LINE = 0.1
"""Of a micro-batch's work on the slowest stage: on lines that are less busy, messages hardly ever meet."""
_FORWARD = Kind.FORWARD  # enum members are looked up slowly


def simulate(
    costs: PipelineCosts,
    *,
    micro_batches: int,
    policy: str = "varuna",
    stash_limits: Sequence[int] | None = None,
    split_last: int = 0,
    empties: bool = False,
    seed: int | None = None,
    work: Sequence[float] | None = None,
) -> StepTrace:
    """Simulate one step of a pipeline with the policy that the engine would run.

    Args:
        costs: of stages and links.
        micro_batches: N of this replica.
        policy: one of ``varuna.schedule.policy.POLICIES``.
        stash_limits: in-flight depth n_k, by stage; the policy's defaults if None.
        split_last: how many of the last backwards run as I and W.
        empties: the stage before the last runs empty again and again.
        seed: of the links' jitter; None: every message is delayed by its mean. A message's delay depends on the
            seed, its link and its number only, so that policies are compared under the same delays.
        work: by micro-batch: how many times as long as the costs say its actions take; None: all take as long.

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
            empties=empties,
            keeps_all=stage.keeps_all,
        )
        pipeline.append(_Stage(k, chosen, stage, work))
    _run(pipeline, _connect(pipeline, costs, micro_batches, seed))
    for stuck in pipeline:
        if not stuck.policy.finished:
            raise RuntimeError(
                f"the simulated pipeline is stuck: stage {stuck.index} waits for {stuck.policy.awaited()}"
            )
    reduced_s = _reduced_s(costs, pipeline)
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
        "begun",
        "busy_until_s",
        "ended",
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
        "shares",
        "starts_s",
        "sums",
        "work",
    )

    def __init__(self, index: int, policy: Policy, costs: StageCosts, shares: Sequence[float] | None) -> None:
        self.index = index
        self.shares = shares
        """by micro-batch: of what an action takes"""
        self.begun = self.ended = 0  # backwards, as a policy counts them
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
        """seconds that a kind of action takes, and the channel that its result goes to"""
        self.sums: _Channel | None = None
        """on which its sums flow, if they share a line with messages"""
        self.kinds: list[Kind] = []
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []

    def act(self, kind: Kind, now_s: float) -> "tuple[float, _Channel | None]":
        """Begin an action; returns when it ends, in seconds, and where its result goes."""
        seconds, channel = self.work[kind]
        if kind is _FORWARD:
            if self.keeps_differ and self.policy.keeps(self.forwards):
                seconds = self.record_s
            self.forwards += 1
        if self.shares is not None:
            seconds *= self._share(kind, self.shares)
        self.policy.count(kind)  # nobody asks it again before the end
        end_s = self.busy_until_s = now_s + seconds
        self.idle = False
        self.kinds.append(kind)
        self.starts_s.append(now_s)
        self.ends_s.append(end_s)
        return end_s, channel

    def _share(self, kind: Kind, shares: Sequence[float]) -> float:
        """That of the micro-batch whose action begins; counts backwards."""
        order = self.policy.backward_order
        if kind is _FORWARD:
            return shares[self.forwards - 1]
        if kind is Kind.WEIGHT:
            self.ended += 1
            return shares[order[self.ended - 1]]
        position = self.begun
        self.begun += kind is not Kind.RECOMPUTE
        self.ended += kind is Kind.BACKWARD
        return shares[order[position]]

    @property
    def row(self) -> Row:
        """The actions that this stage ran, with their times."""
        return Row(self.index, self.policy.backward_order, self.kinds, self.starts_s, self.ends_s)


class _Channel:
    """A directed FIFO link; where it shares lines with others, its messages flow."""

    __slots__ = ("arrivals", "early_s", "flow", "free_s", "receiver", "serialisation_s")

    def __init__(self, receiver: _Stage, arrivals: Arrivals, serialisation_s: float, early_s: float) -> None:
        self.receiver, self.arrivals, self.serialisation_s = receiver, arrivals, serialisation_s
        self.flow: SharedLink | None = None
        self.early_s = early_s
        """seconds between a message's being ready and the end of its action"""
        self.free_s = 0.0

    def send(self, ready_s: float) -> float:
        """Put a message on the link as soon as it is ready and the link is free; returns its arrival in seconds."""
        free_s = self.free_s
        if ready_s > free_s:
            free_s = ready_s
        self.free_s = free_s = free_s + self.serialisation_s
        return self.arrivals.add(free_s)


def _connect(pipeline: list[_Stage], costs: PipelineCosts, micro_batches: int, seed: int | None) -> list[_Channel]:
    """Set how long each action takes and where its result goes; returns channels whose messages flow, by number."""
    lines, flowing = lines_of(costs.links), list[_Channel]()
    work_s = max(stage.forward_s + stage.backward_s for stage in costs.stages)
    is_crowded = busiest_line_s(costs.links) > _FREE_LINE * work_s

    def shared(sender: int, receiver: int, alone: _Channel, share: float) -> _Channel:
        lines_passed = lines[sender].out, lines[receiver].into
        alone.flow = SharedLink(len(flowing), alone.serialisation_s, share, lines_passed)
        flowing.append(alone)
        return alone

    def channel(sender: int, receiver: int) -> _Channel:
        is_down, link, stage = receiver > sender, costs.links[min(sender, receiver)], pipeline[receiver]
        name = f"{seed} {min(sender, receiver)} {'down' if is_down else 'up'}"
        weather = None if seed is None else travel_times_s(link, micro_batches, random.Random(name))
        arrivals = Arrivals(stage.activations if is_down else stage.gradients, link, weather)
        seconds = link.activation_s if is_down else link.gradient_s
        alone = _Channel(stage, arrivals, seconds, link.early_s)
        return shared(sender, receiver, alone, link.line_share) if is_crowded and seconds * link.line_share else alone

    for k, (stage, stage_costs) in enumerate(zip(pipeline, costs.stages, strict=True)):
        downstream = upstream = None
        if k + 1 < len(pipeline):
            downstream = channel(k, k + 1)
        else:  # the loss's gradients are there from the start, like the dataset's inputs
            stage.gradients, stage.gradients_in = [0.0] * micro_batches, micro_batches
        if k:
            upstream = channel(k, k - 1)
        else:
            stage.activations, stage.activations_in = [0.0] * micro_batches, micro_batches
        stage.work = {
            Kind.FORWARD: (stage_costs.forward_s, downstream),
            Kind.RECOMPUTE: (stage_costs.recompute_s, None),
            Kind.BACKWARD: (stage_costs.backward_s, upstream),
            Kind.INPUT: (stage_costs.input_s, upstream),
            Kind.WEIGHT: (stage_costs.weight_s, None),
        }
        if is_crowded and stage_costs.allreduce_s * stage_costs.line_share:
            alone = _Channel(stage, Arrivals([], LinkCosts(), None), stage_costs.allreduce_s, 0.0)
            stage.sums = shared(k, k, alone, stage_costs.line_share)
    return flowing


_Event = tuple[float, int, _Stage]
"""A stage may act."""
_Passing = tuple[float, int, _Channel, bool]
"""A message is ready for a channel, or (True) has left; a number tells events of one time apart."""


def _run(pipeline: list[_Stage], flowing: list[_Channel]) -> None:
    """Let stages act until nothing happens any more."""
    events: list[_Event] = [(0.0, stage.index, stage) for stage in pipeline]
    passing: list[_Passing] = []
    heapify(events)
    while events or passing:
        if passing and (not events or passing[0][0] <= events[0][0]):
            _pass(passing, events, flowing)
            continue
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
        kind = stage.policy.choose(activations_in, gradients_in)
        if kind is None:
            heappop(events)
            _rest(stage, events)
            continue
        end_s, channel = stage.act(kind, now_s)
        heapreplace(events, (end_s, index, stage))
        if stage.sums is not None and stage.policy.finished:
            _offer(stage.sums, end_s, passing)
        if channel is None:
            continue
        ready_s = max(now_s, end_s - channel.early_s)
        if channel.flow is not None:
            _offer(channel, ready_s, passing)
            continue
        arrival_s = channel.send(ready_s)
        receiver = channel.receiver
        if receiver.idle:
            heappush(events, (arrival_s, receiver.index, receiver))


def _rest(stage: _Stage, events: list[_Event]) -> None:
    """A stage has nothing to do until a message arrives: one that is on its way, or a later one, which wakes it."""
    stage.idle = True
    for times_s, known in ((stage.activations, stage.activations_in), (stage.gradients, stage.gradients_in)):
        if known < len(times_s):
            heappush(events, (times_s[known], stage.index, stage))


def _offer(channel: _Channel, ready_s: float, passing: list[_Passing]) -> None:
    """A message will be ready for a channel whose messages flow."""
    assert channel.flow is not None
    heappush(passing, (ready_s, 2 * channel.flow.number, channel, False))


def _pass(passing: list[_Passing], events: list[_Event], flowing: list[_Channel]) -> None:
    """A message begins to leave, or has left; others are faster or slower from now on."""
    now_s, _, channel, has_left = heappop(passing)
    flow = channel.flow
    assert flow is not None
    if not has_left:
        changed = flow.add_message(now_s)
    elif flow.waiting and flow.done_s == now_s:
        arrival_s, receiver = channel.arrivals.add(now_s), channel.receiver
        if receiver.idle:
            heappush(events, (arrival_s, receiver.index, receiver))
        changed = flow.finish(now_s)
    else:  # it was slower, or faster, than when that was said
        return
    for each in changed:
        heappush(passing, (each.done_s, 2 * each.number + 1, flowing[each.number], True))


def _reduced_s(costs: PipelineCosts, pipeline: list[_Stage]) -> list[float]:
    """Return when each stage's gradients are summed: an all-reduce starts at its stage's end, tied ones at the last."""
    reduced_s = [
        stage.busy_until_s + its.allreduce_s if stage.sums is None else stage.sums.arrivals.times_s[-1]
        for stage, its in zip(pipeline, costs.stages, strict=True)
    ]
    for tied in costs.tied:
        exchanged_s = max(reduced_s[k] for k in tied.stages) + tied.exchange_s
        for k in tied.stages:
            reduced_s[k] = exchanged_s
    return reduced_s
