"""The decisions of a run: m once, then a plan for the workers of each generation."""

from typing import NamedTuple

from varuna.calibration.format import Calibration, Calibrations
from varuna.calibration.nominal import ETHERNET, nominal_calibration
from varuna.core.devices import WorkerGroups, class_names
from varuna.core.errors import NoPlanError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.planner.asking.ranking import Ranking
from varuna.planner.asking.request import PlanRequest
from varuna.planner.copies import with_copies
from varuna.planner.goodput import Expected, expected
from varuna.planner.one_class import equal_pipelines
from varuna.planner.pricing.network import are_apart
from varuna.planner.pricing.predict import Prediction, Simulated
from varuna.planner.sweep import rank_plans

INSURANCE = 0.1
"""So much longer a step may take if every section is held twice, where no copies are made and workers idle."""
_CLEARLY = 0.01
"""A larger m than the best for computing is chosen if a step takes so much less."""
WEIGHED = 8
"""Depths that are weighed by expected goodput."""
_DOUBLED = 3
"""Of those, the fastest ones, that are also tried with two replicas."""


class Flags(NamedTuple):
    """Names of flags with which people set limits, for advice that they can follow."""

    memory: str | None = None
    """None: memory is that of the devices, or of a calibration"""
    stages: str = "--stages"


NO_FLAGS = Flags()
_OF_COMMANDS = Flags(memory="--memory-per-worker")


def best_plan(request: PlanRequest, flags: Flags = NO_FLAGS) -> Plan:
    """The first of ``rank_plans``.

    Raises:
        UsageError: the request cannot be.
        NoPlanError: says what was needed, what was found and what to do.
    """
    ranking = rank_plans(request)
    if ranking.plans:
        return ranking.plans[0]
    raise NoPlanError(explain(ranking, request, flags))


def plan_run(
    job: JobFacts,
    *,
    workers: WorkerGroups,
    memory_bytes: int | None = None,
    stages: int | None = None,
    micro_batch: int | None = None,
    calibrations: Calibrations | None = None,
    policy: str = "adaptive",
    flags: Flags = NO_FLAGS,
    copies: bool = False,
) -> Plan:
    """The plan of a generation; the same m as in the generation before, unless it fits no more.

    Args:
        job: what to train.
        workers: that there are.
        memory_bytes: of one worker; if None the calibration's, else what the workers' devices have.
        stages: P if the user fixed it.
        micro_batch: m of the generation before, halved where nothing fits; None on the first one.
        calibrations: of the hardware; nominal if None. Compiled sections run B whole, whatever they say of halves.
        policy: schedule policy.
        flags: for advice.
        copies: the run outlives the loss of a worker, so that copies of its state and sums may be worth their price.
            Otherwise its workers stay, so that m may be made for their number.

    Raises:
        UsageError: the job's m is out of range.
        NoPlanError: nothing fits; the text is about the smallest m tried.
    """
    request = run_request(
        job,
        workers=workers,
        memory_bytes=memory_bytes,
        stages=stages,
        micro_batch=micro_batch,
        calibrations=calibrations,
        policy=policy,
    )
    measured = calibrations is not None
    if request.losses_per_hour and measured:
        ranking = rank_plans(request.model_copy(update={"wanted": WEIGHED}))
        if not ranking.plans:
            raise NoPlanError(explain(ranking, request, flags))
        return by_goodput(ranking, request, copies=copies)[0].plan
    best = best_plan(request, flags)
    if not copies:  # the workers stay
        return _with_larger(best, request)
    plan = with_copies(best, request, measured=measured)
    return plan if plan.holders > 1 else with_copies(_safer(best, request), request, measured=measured)


def run_request(
    job: JobFacts,
    *,
    workers: WorkerGroups,
    memory_bytes: int | None = None,
    stages: int | None = None,
    micro_batch: int | None = None,
    calibrations: Calibrations | None = None,
    policy: str = "adaptive",
) -> PlanRequest:
    """Return the request that ``plan_run`` makes."""
    known = with_options(calibrations or Calibrations.of_one(nominal_calibration(job.model)), job)
    # Nominal figures are no reason to send workers away.
    is_seen = known.across_regions is not None or not are_apart(class_names(workers))
    return PlanRequest(
        calibrations=known,
        workers=workers,
        global_batch=job.global_batch,
        micro_batch=job.micro_batch if micro_batch is None else micro_batch,
        lowers_micro_batch=job.micro_batch is None,
        memory_bytes=memory_bytes,
        stages=stages,
        tentative=job.combines,
        memory_apart=job.memory_apart,
        leaves_idle=is_seen and known.first.across_vms != ETHERNET,
        streams_frozen=job.memory.stream_frozen,
        policy=policy,
        losses_per_hour=job.losses_per_hour,
        saves=job.checkpoint_dir is not None,
        mixes=job.network.links == "host",  # from GPU to GPU, the sums of a stage go to one set of others
    )


class RankedPlan(NamedTuple):
    """A plan, and what it is worth at a rate of losses."""

    plan: Plan
    prediction: Prediction
    expected: Expected


def by_goodput(ranking: Ranking, request: PlanRequest, *, copies: bool) -> list[RankedPlan]:
    """The fastest plans of the best depths, each with one replica and with two if that is possible, best first.

    Args:
        ranking: of the request, with as many depths as are to be weighed.
        request: with a rate of losses.
        copies: see ``plan_run``.
    """
    found = ranking.found
    for plan in ranking.plans[:_DOUBLED]:
        found += _double(plan, request)
    weighed = []
    for plan, prediction in {each.plan: each for each in found}.values():
        made = with_copies(plan, request, measured=True) if copies else plan
        weighed.append(RankedPlan(made, prediction, expected(made, request)))
    return sorted(weighed, key=lambda worth: (-worth.expected.examples_per_s, worth.plan.stages))


def _double(plan: Plan, request: PlanRequest) -> list[Simulated]:
    """The same depth with two replicas, if the plan has one and the workers are enough."""
    name = plan.first.device_class
    asked = request.model_copy(update={"streams_frozen": plan.streams_frozen}).for_class(name)
    if plan.replicas > 1 or asked.classes or not asked.leaves_idle or asked.count < 2 * plan.stages:
        return []
    double = equal_pipelines(asked, plan.stages, 2, plan.micro_batch)
    return [] if double is None else [double._replace(plan=double.plan.with_each_pipeline(device_class=name))]


def _with_larger(best: Plan, request: PlanRequest) -> Plan:
    """The best plan with a larger m, if steps are clearly shorter: more sums cross while the last backward runs.

    Only for workers that stay, on a network that was measured: where each has one or two large micro-batches, a worker
    less makes a step much longer.
    """
    known = request.calibration
    is_open = request.micro_batch is None and len(known.sizes) > 1 and not known.model.batch_dependent
    if not is_open or not request.leaves_idle:
        return best
    while (m := 2 * best.micro_batch) <= request.global_batch // request.count:
        ranking = rank_plans(request.model_copy(update={"micro_batch": m, "lowers_micro_batch": False}))
        if not ranking.plans or ranking.plans[0].step_s > best.step_s * (1 - _CLEARLY):
            break
        best = ranking.plans[0]
    return best


def _safer(best: Plan, request: PlanRequest) -> Plan:
    """The best plan with a second replica, if that costs little: workers that would idle make it.

    For where there is no room or time for copies: then a lost worker costs all steps since the newest checkpoint.
    """
    return next((each.plan for each in _double(best, request) if each.step_s <= best.step_s * (1 + INSURANCE)), best)


def with_options(known: Calibrations, job: JobFacts) -> Calibrations:
    """These calibrations, with what a job's options change in them."""

    def changed(known: Calibration) -> Calibration:
        if job.memory.shard_optimizer:
            known = known.with_sharded_optimizer()
        if job.memory.offload_optimizer:
            known = known.offloaded(apart=job.memory_apart)
        if job.network.reduction == "bf16":
            known = known.rounded()
        return known.without_halves() if job.compiled else known

    return known.each(changed)


def explain(ranking: Ranking, request: PlanRequest, flags: Flags) -> str:
    """The closest miss of a ranking without plans, and every way out that could help."""
    stages, sections = request.stages, request.calibration.section_count
    if not ranking.rejected:
        return "no plan fits: a pipeline needs at least 1 worker, but there are 0. Start a worker."
    closest = min(ranking.rejected, key=lambda rejection: (rejection.missing_bytes or 0, rejection.stages))
    if closest.missing_bytes is None and closest.stages > sections:
        return f"{closest.reason}; pass cut=... or lower {flags.stages}."
    if closest.missing_bytes is None:
        return f"{closest.reason}; add workers or lower {flags.stages}."
    advice = [f"raise {flags.memory}" if flags.memory else "use workers with more memory"]
    if stages is not None and stages < sections:
        advice.insert(0, f"raise or leave out {flags.stages}")
    elif len(ranking.rejected) < sections:
        advice.insert(0, "add workers")
    if (closest.micro_batch or 1) > 1 and not request.calibration.model.batch_dependent:
        advice.append("pass a smaller micro_batch")
    text = " or ".join([", ".join(advice[:-1]), advice[-1]] if len(advice) > 1 else advice)
    return f"no plan fits: {closest.reason}. {text[0].upper()}{text[1:]}."


class RunPlanner:
    """``plan_run`` under a user's constraints, as a manager asks it.

    Args:
        memory_bytes: of one worker; None: what its device has.
        stages: P if the user fixed it.
        flags: for advice.
        copies: see ``plan_run``.
    """

    def __init__(
        self, *, memory_bytes: int | None, stages: int | None, flags: Flags = _OF_COMMANDS, copies: bool = True
    ) -> None:
        self._memory_bytes, self._stages, self._flags, self._copies = memory_bytes, stages, flags, copies

    def __call__(
        self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None, calibrations: Calibrations | None
    ) -> Plan:
        """The plan of a generation."""
        return plan_run(
            job,
            workers=workers,
            memory_bytes=self._memory_bytes,
            stages=self._stages,
            micro_batch=micro_batch,
            calibrations=calibrations,
            flags=self._flags,
            copies=self._copies,
        )

    def request(
        self,
        job: JobFacts,
        workers: WorkerGroups,
        micro_batch: int | None,
        calibrations: Calibrations | None,
        wanted: int,
    ) -> PlanRequest:
        """The same question, for as many runners-up as are ``wanted``."""
        made = run_request(
            job,
            workers=workers,
            memory_bytes=self._memory_bytes,
            stages=self._stages,
            micro_batch=micro_batch,
            calibrations=calibrations,
        )
        return made.model_copy(update={"wanted": wanted})


def planner(
    *, memory_bytes: int | None, stages: int | None, flags: Flags = _OF_COMMANDS, copies: bool = True
) -> RunPlanner:
    """Plans from (job, workers, micro-batch, calibrations)."""
    return RunPlanner(memory_bytes=memory_bytes, stages=stages, flags=flags, copies=copies)
