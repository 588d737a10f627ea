"""What the simulator is told about a plan: seconds and bytes of its stages and links."""

from collections.abc import Sequence

from varuna.core.plan import Plan
from varuna.planner.network import crossings, link_of, reduce_s
from varuna.planner.profile import Profile
from varuna.planner.sizing import crossing_time_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts, TiedCosts


def pipeline_costs(profile: Profile, plan: Plan, *, gpus_per_vm: int) -> PipelineCosts:
    """Costs of one replica of ``plan``, whose micro-batches have the profile's size."""
    spans = [plan.sections_of(k) for k in range(plan.stages)]
    return PipelineCosts(
        stages=tuple(_stage_costs(profile, plan, k, gpus_per_vm) for k in range(plan.stages)),
        links=tuple(
            _link_costs(profile, span.start - 1, crosses)
            for span, crosses in zip(spans[1:], crossings(plan.stages, plan.replicas, gpus_per_vm), strict=True)
        ),
        tied=_tied_costs(profile, plan, spans, gpus_per_vm),
        optimizer_s=max(_optimizer_s(profile, span) for span in spans) + _vote_s(profile, plan, gpus_per_vm),
    )


def _stage_costs(profile: Profile, plan: Plan, stage: int, gpus_per_vm: int) -> StageCosts:
    span, kept, action_s = plan.sections_of(stage), plan.kept_sections_of(stage), profile.calibration.action_s
    moved_s = action_s + (profile.calibration.hand_over_s if plan.stages > 1 else 0.0)
    recomputed = range(span.start, kept.start)
    kept_bytes = int(profile.activation_bytes.over(kept))
    forward_s = profile.forward_s.over(recomputed) + profile.record_s.over(kept) + moved_s
    recompute_s = profile.recompute_s.over(recomputed) + action_s
    backward_s = profile.backward_s.over(span) + moved_s
    if plan.stash_on_device:  # copies hide behind computation; where they take longer, R waits for its input
        depth = plan.stash_limits[stage]
        crossing_s = crossing_time_s(profile, span, moved=depth - plan.stash_on_device[stage], depth=depth)
        recompute_s += max(0.0, crossing_s - forward_s - recompute_s - backward_s)
    return StageCosts(
        forward_s=forward_s,
        recompute_s=recompute_s,
        backward_s=backward_s,
        input_s=profile.input_s.over(span) + moved_s,
        weight_s=profile.weight_s.over(span) + action_s,
        record_s=profile.record_s.over(span) + moved_s,
        allreduce_s=_exposed_reduce_s(profile, plan, span, gpus_per_vm),
        keeps_all=plan.keeps_all(stage),
        stash_bytes=kept_bytes + (profile.boundary_bytes[span.start - 1] if span.start else 0),
        live_bytes=int(profile.activation_bytes.over(span)) - kept_bytes,
    )


def _exposed_reduce_s(profile: Profile, plan: Plan, span: range, gpus_per_vm: int) -> float:
    """From the end of the stage's last backward to the end of its last all-reduce.

    Sections are reduced one after another, the last one first, each as soon as its last backward is through.
    """
    if plan.replicas == 1:
        return 0.0
    backward = profile.weight_s if plan.split_last else profile.backward_s
    rings_s: dict[float, float] = {}
    done_s = reduced_s = 0.0
    for section in reversed(span):
        size_bytes = profile.reduced_bytes.values[section]
        if size_bytes not in rings_s:
            rings_s[size_bytes] = reduce_s(
                profile.calibration,
                size_bytes,
                stages=plan.stages,
                replicas=plan.replicas,
                gpus_per_vm=gpus_per_vm,
                members=plan.replicas,
            )
        done_s += backward.values[section]
        reduced_s = max(reduced_s, done_s) + rings_s[size_bytes]
    return reduced_s - done_s


def _vote_s(profile: Profile, plan: Plan, gpus_per_vm: int) -> float:
    """The all-reduce over all ranks that ends a step: norms by section, loss and weight by micro-batch."""
    return reduce_s(
        profile.calibration,
        8 * (profile.sections + 2 * plan.micro_batches),
        stages=plan.stages,
        replicas=plan.replicas,
        gpus_per_vm=gpus_per_vm,
        members=plan.workers,
    )


def _link_costs(profile: Profile, section: int, crosses: bool) -> LinkCosts:
    link = link_of(profile.calibration, crosses=crosses)
    return LinkCosts(
        latency_s=link.latency_s,
        activation_s=profile.boundary_bytes[section] / link.bytes_per_s,
        gradient_s=profile.gradient_boundary_bytes[section] / link.bytes_per_s,
        jitter=link.jitter,
    )


def _optimizer_s(profile: Profile, span: range) -> float:
    optimizer = profile.calibration.optimizer
    state_bytes = profile.state_bytes.over(span)
    seconds = optimizer.fixed_s
    if optimizer.bytes_per_s is not None:
        seconds += (state_bytes + profile.gradient_bytes.over(span)) / optimizer.bytes_per_s
    if optimizer.host_bytes_per_s is not None:
        there_and_back = 2 * (state_bytes - profile.parameter_bytes.over(span))
        seconds += there_and_back / optimizer.host_bytes_per_s
    return seconds


def _tied_costs(profile: Profile, plan: Plan, spans: Sequence[range], gpus_per_vm: int) -> tuple[TiedCosts, ...]:
    """Exchanges of the gradients of tied parameters between the stages that hold them."""
    found = []
    for tied in profile.calibration.tied:
        holders = tuple(k for k, span in enumerate(spans) if any(section in span for section in tied.sections))
        if len(holders) > 1:
            exchange_s = reduce_s(
                profile.calibration,
                tied.size_bytes,
                stages=plan.stages,
                replicas=plan.replicas,
                gpus_per_vm=gpus_per_vm,
                members=len(holders),
            )
            found.append(TiedCosts(stages=holders, exchange_s=exchange_s))
    return tuple(found)
