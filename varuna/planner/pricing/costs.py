"""The simulator's input for a plan: seconds and bytes of its stages and links."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.pricing.network import crossings, exchange_s, link_of, reduce_s, reduce_share
from varuna.planner.pricing.profile import Profile
from varuna.planner.pricing.sharded_optimizer import sharding_of
from varuna.planner.pricing.stage_size import Size, crossing_time_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, TiedCosts


def pipeline_costs(
    profile: Profile, plan: Plan, *, gpus_per_vm: int, own: Sequence[int] | None = None
) -> PipelineCosts:
    """Costs of one replica of ``plan``, whose micro-batches have the profile's size; ``own`` is as for ``Pricer``."""
    limits, none = plan.first.stash_limits, (0,) * plan.stages
    sizes = map(Size, limits, plan.first.kept or none, map(sub, limits, plan.first.stash_on_device or limits))
    return Pricer(profile, gpus_per_vm=gpus_per_vm).costs(
        plan.first.starts,
        tuple(sizes),
        replicas=plan.replicas,
        micro_batches=plan.micro_batches,
        splits=plan.first.split_last > 0,
        own=own,
    )


class ActionOverhead(NamedTuple):
    """Seconds that a stage's actions take beyond the times of their sections."""

    plain_s: float
    """for R and W"""
    backward_s: float
    """for B and I, which give a message to the stage before, if there is one"""
    forward_s: float
    """for F, which gives one to the next stage, if there is one, and may read samples"""


def around_sections(profile: Profile, start: int, stop: int, *, is_one_of_many: bool) -> ActionOverhead:
    """Seconds of a stage's actions beyond its sections, alone or in a pipeline of several.

    Args:
        profile: of the sections, at one m.
        start: first section of the stage.
        stop: one past its last section.
        is_one_of_many: the pipeline has other stages, so that actions give messages.
    """
    known = profile.calibration
    given_s = known.hand_over_s if is_one_of_many else 0.0  # what is taken is waited for, and costs hardly anything
    reads = profile.input_bytes.before[stop] > profile.input_bytes.before[start]
    return ActionOverhead(
        plain_s=known.action_s,
        backward_s=known.action_s + (given_s if start else 0.0),
        forward_s=known.action_s + (given_s if stop < profile.sections else 0.0) + (known.samples_s if reads else 0.0),
    )


_Rings = tuple[float, ...]
"""Seconds of an all-reduce, by size of what is reduced; () where there is one replica."""

_Span = tuple[int, int, Size]
"""Sections of a stage, and what it does with its memory."""


class _Setting(NamedTuple):
    """Everything else that the costs of a stage depend on."""

    rings_s: _Rings
    ring_share: float
    """of its host's line"""
    is_one_of_many: bool
    splits: bool


class Pricer:
    """Costs of many plans of one profile: what they share is looked up once."""

    def __init__(self, profile: Profile, *, gpus_per_vm: int) -> None:
        self._profile, self._gpus_per_vm = profile, gpus_per_vm
        self._forward, self._record = profile.forward_s.before, profile.record_s.before
        self._recompute, self._backward = profile.recompute_s.before, profile.backward_s.before
        self._input, self._weight = profile.input_s.before, profile.weight_s.before
        self._activations, self._state = profile.activation_bytes.before, profile.state_bytes.before
        self._gradients, self._parameters = profile.gradient_bytes.before, profile.parameter_bytes.before
        self._links: dict[tuple[int, bool], LinkCosts] = {}
        self._reduced = sorted(set(profile.reduced_bytes.values))
        self._stages: dict[_Setting, dict[_Span, StageCosts]] = {}
        self._rings: dict[_Rings, list[float]] = {}

    def costs(
        self,
        starts: Sequence[int],
        sizes: Sequence[Size],
        *,
        replicas: int,
        micro_batches: int,
        splits: bool,
        own: Sequence[int] | None = None,
    ) -> PipelineCosts:
        """Costs of one replica.

        Args:
            starts: first section of each stage.
            sizes: of each stage.
            replicas: D.
            micro_batches: of a step over all replicas.
            splits: some backwards run as I and W.
            own: stages that run on such devices, whose update counts; None: all.
        """
        profile, stages = self._profile, len(starts)
        ends = (*starts[1:], profile.sections)
        vm_size = self._gpus_per_vm
        share = reduce_share(profile.calibration, stages=stages, replicas=replicas, gpus_per_vm=vm_size)
        setting = _Setting(self._rings_s(stages, replicas), share, stages > 1, splits)
        known = self._stages.setdefault(setting, {})
        crossed = crossings(stages, replicas, vm_size)
        here = range(stages) if own is None else own
        return PipelineCosts(
            stages=tuple(
                known.get(span) or known.setdefault(span, self._stage(*span, setting))
                for span in zip(starts, ends, sizes, strict=True)
            ),
            links=tuple(self._link(start - 1, crosses) for start, crosses in zip(starts[1:], crossed, strict=True)),
            tied=self._tied(starts, replicas),
            optimizer_s=max(self._optimizer_s(starts[k], ends[k], stages, replicas) for k in here)
            + self._vote_s(stages, replicas, micro_batches),
        )

    def _stage(self, start: int, stop: int, size: Size, setting: _Setting) -> StageCosts:
        profile = self._profile
        around = around_sections(profile, start, stop, is_one_of_many=setting.is_one_of_many)
        forward, record, activations = self._forward, self._record, self._activations
        first_kept = stop - size.kept
        forward_s = (forward[first_kept] - forward[start]) + (record[stop] - record[first_kept]) + around.forward_s
        recompute_s = self._recompute[first_kept] - self._recompute[start] + around.plain_s
        backward_s = self._backward[stop] - self._backward[start] + around.backward_s
        input_s = self._input[stop] - self._input[start] + around.backward_s
        record_s = record[stop] - record[start] + around.forward_s
        came_s = profile.pass_s(start, stop)  # frozen parameters are read ahead; where they come later, sections wait
        forward_s, recompute_s, backward_s, input_s, record_s = (
            max(seconds, came_s) for seconds in (forward_s, recompute_s, backward_s, input_s, record_s)
        )
        if size.moved:  # copies hide behind computation; where they take longer, R waits for its input
            crossing_s = crossing_time_s(profile, range(start, stop), moved=size.moved, depth=size.depth)
            recompute_s += max(0.0, crossing_s - forward_s - recompute_s - backward_s)
        return StageCosts(
            forward_s=forward_s,
            recompute_s=recompute_s,
            backward_s=backward_s,
            input_s=input_s,
            weight_s=self._weight[stop] - self._weight[start] + around.plain_s,
            record_s=record_s,
            allreduce_s=self._exposed_reduce_s(start, stop, setting) if setting.rings_s else 0.0,
            line_share=setting.ring_share,
            keeps_all=first_kept == start,
            stash_bytes=int(activations[stop] - activations[first_kept])
            + (profile.boundary_bytes[start - 1] if start else 0),
            live_bytes=int(activations[first_kept] - activations[start]),
        )

    def _exposed_reduce_s(self, start: int, stop: int, setting: _Setting) -> float:
        """Seconds from the end of the stage's last backward to the end of its last all-reduce.

        Sections are reduced one after another, the last one first, each as soon as its last backward is through.
        """
        backward = (self._profile.weight_s if setting.splits else self._profile.backward_s).values
        rings_s = self._of_sections(setting.rings_s)
        done_s = reduced_s = 0.0
        for section in range(stop - 1, start - 1, -1):
            done_s += backward[section]
            reduced_s = (done_s if done_s > reduced_s else reduced_s) + rings_s[section]
        return reduced_s - done_s

    def _rings_s(self, stages: int, replicas: int) -> _Rings:
        if replicas == 1:
            return ()
        return tuple(self._reduce_s(size, stages, replicas, members=replicas) for size in self._reduced)

    def _of_sections(self, rings_s: _Rings) -> list[float]:
        known = self._rings.get(rings_s)
        if known is None:
            by_size = dict(zip(self._reduced, rings_s, strict=True))
            known = self._rings[rings_s] = [by_size[size] for size in self._profile.reduced_bytes.values]
        return known

    def _vote_s(self, stages: int, replicas: int, micro_batches: int) -> float:
        """Seconds of the vote, the all-reduce over all ranks that ends a step."""
        size_bytes = 8 * (self._profile.sections + 2 * micro_batches)
        return self._reduce_s(size_bytes, stages, replicas, members=stages * replicas)

    def _reduce_s(self, size_bytes: float, stages: int, replicas: int, *, members: int) -> float:
        return reduce_s(
            self._profile.calibration,
            size_bytes,
            stages=stages,
            replicas=replicas,
            gpus_per_vm=self._gpus_per_vm,
            members=members,
        )

    def _link(self, section: int, crosses: bool) -> LinkCosts:
        """Return the costs of the link after ``section``."""
        known = self._links.get((section, crosses))
        if known is None:
            profile = self._profile
            link = link_of(profile.calibration, crosses=crosses)
            there, back = profile.boundary_bytes[section], profile.gradient_boundary_bytes[section]
            travels_s = link.latency_of(max(there, back))
            # Sockets take a message while the action that gives it still runs.
            gone_s = min(profile.calibration.hand_over_s, travels_s + min(there, back) / link.bytes_per_s)
            known = self._links[section, crosses] = LinkCosts(
                latency_s=max(0.0, travels_s - gone_s),
                early_s=max(0.0, gone_s - travels_s),
                activation_s=there / link.bytes_per_s,
                gradient_s=back / link.bytes_per_s,
                jitter=link.jitter,
                line_share=link.line_share if crosses else 0.0,
            )
        return known

    def _optimizer_s(self, start: int, stop: int, stages: int, replicas: int) -> float:
        """Seconds of a stage's update, on the replica with the most state, and of the gather of what others updated.

        The gather is half an all-reduce of the parameters.
        """
        optimizer, sharding = self._profile.calibration.optimizer, sharding_of(self._profile, start, stop, replicas)
        state, parameters = self._state[stop] - self._state[start], self._parameters[stop] - self._parameters[start]
        state -= sharding.absent_state
        seconds = optimizer.fixed_s
        if optimizer.bytes_per_s is not None:
            seconds += (state + (self._gradients[stop] - self._gradients[start])) / optimizer.bytes_per_s
        if optimizer.host_bytes_per_s is not None:
            seconds += 2 * (state - parameters) / optimizer.host_bytes_per_s
        if sharding.gathered:
            seconds += 0.5 * self._reduce_s(parameters, stages, replicas, members=replicas)
        return seconds

    def _tied(self, starts: Sequence[int], replicas: int) -> tuple[TiedCosts, ...]:
        """Seconds in which the stages that hold a tied parameter exchange its gradients."""
        found = []
        for tied in self._profile.calibration.tied:
            holders = tuple(sorted({bisect_right(starts, section) - 1 for section in tied.sections}))
            if len(holders) > 1:
                seconds = exchange_s(
                    self._profile.calibration,
                    tied.size_bytes,
                    crosses=len(starts) * replicas > self._gpus_per_vm,
                    members=len(holders),
                )
                found.append(TiedCosts(stages=holders, exchange_s=seconds))
        return tuple(found)
