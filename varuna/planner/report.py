"""A ranking as people and programs read it: what each plan takes, holds and costs, and why the others lost."""

from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter

from pydantic import Field

from varuna.core.dealing import shares_text
from varuna.core.plan import Copies, Pipeline, Plan
from varuna.core.times import StepParts
from varuna.core.value import Value
from varuna.planner.asking.ranking import PrunedPlan, Ranking, Rejection
from varuna.planner.asking.request import PlanRequest
from varuna.planner.goodput import expected
from varuna.planner.line import Line
from varuna.planner.pricing.predict import Breakdown
from varuna.planner.pricing.profile import profile

_NAMES = {
    "compute_s": "compute",
    "transfer_s": "transfer",
    "reduce_s": "all-reduce",
    "optimizer_s": "optimizer",
    "idle_s": "idle",
}


class PlanReport(Value):
    """One plan of the ranking, as it is printed."""

    stages: int = Field(description="P")
    replicas: int = Field(description="D")
    shape: str = Field(description="P x D; of pipelines of different depth, each with their number")
    micro_batch: int = Field(description="m, examples")
    micro_batches: int = Field(description="N_m of the replica with the most")
    step_time_s: float
    examples_per_s: float
    loss_s: float | None = Field(default=None, description="of training, that the loss of a worker costs")
    examples_per_s_left: float | None = Field(default=None, description="at the given rate of losses")
    copies: Copies = Field(default=Copies.NONE, description="of each stage's state or sums, in other workers' memory")
    bubble: float = Field(description="share of the pipeline's time in which the average GPU does not compute")
    memory_bytes: tuple[int, ...] = Field(description="peak, by stage; of unlike pipelines, one kind after the other")
    host_bytes: tuple[int, ...] = Field(description="of state and inputs in host memory, by stage; empty: none")
    streams_frozen: bool = Field(description="parameters that are not trained rest in host memory")
    breakdown: StepParts
    gpus_used: int
    classes: tuple["ClassReport", ...] = Field(default=(), description="of GPUs; empty where all are of one")
    gpus_idle: int
    slower: float = Field(description="step time over that of the first plan, minus 1")
    why: str = Field(description="what makes it slower than the first plan")
    sharing: str = Field(description="how the global batch is shared out")
    dollars_per_hour: float | None
    dollars_per_million_examples: float | None
    policy: str
    starts: tuple[int, ...] = Field(description="first section of each stage")
    in_flight: tuple[int, ...] = Field(description="most micro-batches in flight, by stage")
    kept: tuple[int, ...] = Field(description="sections that keep their activations, by stage")
    stash_on_device: tuple[int, ...] = Field(description="of those in flight, whose inputs stay on the GPU, by stage")
    split_last: int = Field(description="backwards at the end that run as I and W")
    empties: bool = Field(description="the stage before the last runs empty again and again, and needs fewer R's")
    snapshot_s: float | None = Field(description="copying the largest stage out for a checkpoint")


class ClassReport(Value):
    """The GPUs of one class, and their work in a plan."""

    name: str
    shape: str = Field(description="P x D of its pipelines; of those that run on other classes, too: stages/P x D")
    gpus: int
    micro_batches: int = Field(description="of a step, that they run")


class RankingReport(Value):
    """Everything that ``varuna plan`` prints."""

    model: str
    hardware: str
    calibrated: str = Field(description="when; empty if it is not known")
    gpus: int
    gpus_per_vm: int
    global_batch: int
    memory_bytes: int | None = Field(description="of a GPU; null: unlimited, or by class")
    objective: str
    losses_per_hour: float = Field(default=0.0, description="of workers; if there are any, the plans are ranked by it")
    plans: tuple[PlanReport, ...] = Field(description="best first")
    outpaced: tuple[PrunedPlan, ...]
    rejected: tuple[Rejection, ...]
    idle: tuple[str, ...] = Field(default=(), description="why GPUs of a class are left out, if any are")
    line: Line | None = Field(default=None, description="that the best plan needs between VMs, if it was asked")


def report(request: PlanRequest, ranking: Ranking, *, price_per_hour: float | None) -> RankingReport:
    """The first ``request.wanted`` plans, and what their steps are spent on.

    Args:
        request: what was asked for.
        ranking: the answer.
        price_per_hour: of a GPU, in dollars; None: what the calibration says.
    """
    shown = ranking.plans[: request.wanted]
    breakdowns = [prediction.breakdown for prediction in ranking.predictions[: request.wanted]]
    plans = [
        _plan_report(request, plan, parts, shown[0], breakdowns[0], price_per_hour)
        for plan, parts in zip(shown, breakdowns, strict=True)
    ]
    calibration = request.calibration
    return RankingReport(
        model=calibration.model.name,
        hardware=_hardware(request),
        calibrated=calibration.created,
        gpus=request.count,
        gpus_per_vm=request.vm_size,
        global_batch=request.global_batch,
        memory_bytes=request.limit_bytes if len(request.classes) < 2 else request.memory_bytes,
        objective=request.objective,
        losses_per_hour=request.losses_per_hour,
        plans=tuple(plans),
        outpaced=_outpaced(request, ranking),
        rejected=ranking.rejected,
        idle=tuple(_idle(request, ranking)),
    )


def _hardware(request: PlanRequest) -> str:
    """The GPUs, with how many there are of each class."""
    if not request.classes:
        return request.calibration.hardware.name
    named = {name: request.calibrations.of(name).hardware.name for name in request.classes}
    return " + ".join(f"{request.count_of(name)} x {named[name]}" for name in request.classes)


def _idle(request: PlanRequest, ranking: Ranking) -> Iterator[str]:
    """Say why GPUs of a class are left out of the best plan: what the best plan with them would take."""
    for name in request.classes if ranking.plans else ():
        best, rejected = ranking.plans[0], [each for each in ranking.rejected if each.device_class == name]
        used, there = best.classes.get(name, 0), request.count_of(name)
        left = there - used
        if not best.is_by_class or left <= 0:
            continue
        more = [plan for plan in ranking.plans if plan.classes.get(name, 0) > used]
        if rejected:
            why = rejected[0].reason.split(": ", 1)[1]
        elif more:
            why = f"with more of them a step takes {more[0].step_s / best.step_s - 1:.1%} longer ({more[0].shape})"
        else:
            why = "no plan with more of them was found"
        yield f"{left} of {there} {name} idle: {why}"


def _outpaced(request: PlanRequest, ranking: Ranking) -> tuple[PrunedPlan, ...]:
    """Best entry of each depth that is not among the plans shown, by bound."""
    known = {plan.stages for plan in ranking.plans[: request.wanted]}
    slower = [
        PrunedPlan(stages=plan.stages, replicas=plan.replicas, micro_batch=plan.micro_batch, at_least_s=plan.step_s)
        for plan in ranking.plans[request.wanted :]
    ]
    best: dict[int, PrunedPlan] = {}
    for entry in sorted((*slower, *ranking.outpaced), key=attrgetter("at_least_s")):
        if entry.stages not in known:
            best.setdefault(entry.stages, entry)
    return tuple(best.values())


def _plan_report(
    request: PlanRequest,
    plan: Plan,
    parts: Breakdown,
    best: Plan,
    best_parts: Breakdown,
    price_per_hour: float | None,
) -> PlanReport:
    examples_per_s = plan.global_batch / plan.step_s if plan.step_s else float("inf")
    hourly = request.hourly(plan.classes) if price_per_hour is None else price_per_hour * request.paid(plan.workers)
    worth = expected(plan, request) if request.losses_per_hour else None
    return PlanReport(
        stages=plan.stages,
        replicas=plan.replicas,
        shape=plan.shape,
        micro_batch=plan.micro_batch,
        micro_batches=len(plan.micro_batches_of(0)),
        step_time_s=plan.step_s,
        examples_per_s=examples_per_s,
        loss_s=worth.loss_s if worth is not None else None,
        examples_per_s_left=worth.examples_per_s if worth is not None else None,
        copies=plan.copies,
        bubble=parts.bubble,
        memory_bytes=tuple(size for pipeline in plan.pipelines for size in pipeline.memory_bytes),
        host_bytes=tuple(size for pipeline in plan.pipelines for size in pipeline.host_bytes),
        streams_frozen=plan.streams_frozen,
        breakdown=StepParts(**asdict(parts)),
        gpus_used=plan.workers,
        classes=_classes(plan),
        gpus_idle=request.count - plan.workers,
        slower=plan.step_s / best.step_s - 1 if best.step_s else 0.0,
        why="" if plan is best else _why(request, plan, parts, best, best_parts),
        sharing=_sharing(plan),
        dollars_per_hour=hourly,
        dollars_per_million_examples=None if hourly is None else hourly / 3600 / examples_per_s * 1e6,
        policy=plan.policy,
        starts=plan.first.starts,
        in_flight=plan.first.stash_limits,
        kept=plan.first.kept or (0,) * plan.stages,
        stash_on_device=plan.first.stash_on_device or plan.first.stash_limits,
        split_last=plan.first.split_last,
        empties=plan.first.empties,
        snapshot_s=_snapshot_s(request, plan),
    )


def _classes(plan: Plan) -> tuple[ClassReport, ...]:
    """Report the work of each class; nothing where a plan names none."""
    found = []
    for name, gpus in plan.classes.items() if plan.is_by_class else ():
        owned = [(replicas, pipeline, _stages_on(pipeline, name)) for replicas, pipeline in plan.kinds]
        kinds = [(replicas, pipeline, own) for replicas, pipeline, own in owned if own]
        shape = "+".join(
            f"{own if own == pipeline.stages else f'{own}/{pipeline.stages}'}x{len(replicas)}"
            for replicas, pipeline, own in kinds
        )
        shares = sum(plan.shares[replica] for replicas, _, _ in kinds for replica in replicas)
        found.append(ClassReport(name=name, shape=shape, gpus=gpus, micro_batches=shares))
    return tuple(found)


def _stages_on(pipeline: Pipeline, name: str) -> int:
    """Count the stages that run on devices of a class."""
    return sum(pipeline.class_of(stage) == name for stage in range(pipeline.stages))


def _why(request: PlanRequest, plan: Plan, parts: Breakdown, best: Plan, best_parts: Breakdown) -> str:
    """The two parts of a step that grew most against the best plan, and GPUs that do not work."""
    if plan.step_s < best.step_s and request.losses_per_hour:
        return "faster, but losses cost more"
    if plan.step_s <= best.step_s:
        return "as fast" if request.objective == "time" else "dearer"
    grown = {label: getattr(parts, name) - getattr(best_parts, name) for name, label in _NAMES.items()}
    least = 0.1 * (plan.step_s - best.step_s)
    most = [label for label in sorted(grown, key=grown.__getitem__, reverse=True) if grown[label] > least][:2]
    words = [f"+{grown[label]:.2g} s {label}" for label in most]
    if plan.workers < best.workers:
        words.append(f"{_gpus(request.count - plan.workers)} idle")
    return ", ".join(words)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _sharing(plan: Plan) -> str:
    """Say how many micro-batches each replica runs, and how M stays exact."""
    base, more = divmod(plan.micro_batches, plan.replicas)
    if not plan.is_uniform:
        text = f"dealt so that all end together: {shares_text(plan.shares)} micro-batches of {plan.micro_batch}"
    elif plan.speeds:
        text = f"dealt by speed: {shares_text(plan.shares)} micro-batches of {plan.micro_batch}"
    elif not more:
        text = f"each replica runs {base} micro-batches of {plan.micro_batch}"
    else:
        text = f"{more} replicas run {base + 1} micro-batches of {plan.micro_batch}, {plan.replicas - more} run {base}"
    short = plan.global_batch % plan.micro_batch
    return f"{text}; the last has {short}" if short else text


def _snapshot_s(request: PlanRequest, plan: Plan) -> float | None:
    """Seconds to copy a stage's parameters and state; its replicas share the work."""
    rate = request.calibration.snapshot_bytes_per_s
    if rate is None:
        return None
    state = profile(request.calibration, plan.micro_batch).state_bytes
    return max(state.over(slot.sections) for slot in plan.slots) / plan.replicas / rate
