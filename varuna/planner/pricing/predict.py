"""The predicted time of a plan's step, and what it is spent on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from varuna.calibration.format import Calibration, Calibrations
from varuna.core.plan import Plan
from varuna.planner.pricing.network import across_regions, are_apart, ring_s
from varuna.planner.pricing.spanning import spanning_costs
from varuna.schedule.actions import Kind
from varuna.simulator.bounds import bottleneck_s
from varuna.simulator.costs import PipelineCosts
from varuna.simulator.step import simulate
from varuna.simulator.trace import StepTrace

_SIMULATED_FORWARDS = 2_000  # over all stages; with their R and B some 10 ms
_SIMULATED_TURNS = 1  # micro-batches per stage beyond those in flight: until the pipeline is in its stride
SHORTEST_S = 1e-12  # of a micro-batch, where a calibration says that nothing takes any time
_REMEMBERED = 16  # steps, of up to a MB each: pipelines of a mix are tried again with other shares of a batch
_FEWEST_BACKWARDS = 8  # for a pace to mean something
_FULLEST = 4  # stages that are looked at
_CHANCE = 2  # R's that lie beyond the ends of what is counted
_SUMMED_BYTES = 100e6  # of sums, to tell a slow ring from a fast one by
_MANY_BACKWARDS = 128  # for it to be the truth, even below the bottleneck's time: idle stages spare R's


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated step; of a long one the beginning and the end, with micro-batches in between that repeat."""

    trace: StepTrace
    repeated: int
    """Number of micro-batches that were not simulated."""
    pace_s: float
    """Seconds of each of them."""
    speed: float = 1.0
    """Of the pipeline's workers, by ``Plan.speeds``."""

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of the optimizer step."""
        return self.trace.step_s + self.repeated * self.pace_s

    @property
    def micro_batches(self) -> int:
        """Simulated and repeated ones."""
        return len(self.trace.rows[0].backward_order) + self.repeated

    @property
    def after_s(self) -> float:
        """Seconds from the last backward to the end of the step, however many micro-batches there are."""
        return self.trace.exposed_reduce_s + self.trace.costs.optimizer_s

    @property
    def breakdown(self) -> "Breakdown":
        """The parts of the step's time, averaged over GPUs."""
        stages = self.trace.costs.stages
        times = self.trace.stage_times
        compute_s = sum(each.compute_s for each in times) / len(stages)
        last = len(stages) - 1
        for k, stage in enumerate(stages):
            recompute_s = 0.0 if k == last or stage.keeps_all else stage.recompute_s
            compute_s += self.repeated * (stage.forward_s + recompute_s + stage.backward_s) / len(stages)
        optimizer_s, exposed_s = self.trace.costs.optimizer_s, self.trace.exposed_reduce_s
        waiting_s = max(0.0, self.step_s - compute_s - optimizer_s - exposed_s)
        simulated_s = sum(each.transfer_s for each in times) / len(stages)
        transfer_s = min(waiting_s, simulated_s)
        return Breakdown(
            compute_s=compute_s,
            transfer_s=transfer_s,
            reduce_s=exposed_s,
            optimizer_s=optimizer_s,
            idle_s=waiting_s - transfer_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Parts of a step on the average GPU, in seconds; they add up to the step."""

    compute_s: float
    transfer_s: float
    """Idle while what runs next is on its way."""
    reduce_s: float
    """All-reduces after the last backward of the pipeline; the others are hidden."""
    optimizer_s: float
    idle_s: float
    """Idle while what runs next is not made yet: filling, draining, uneven stages."""

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time, up to its last backward, in which the average GPU does not compute."""
        span_s = self.compute_s + self.transfer_s + self.idle_s
        return (self.transfer_s + self.idle_s) / span_s if span_s else 0.0


class Simulated(NamedTuple):
    """A plan, and the step that its ``step_s`` is of."""

    plan: Plan
    prediction: Prediction

    @property
    def step_s(self) -> float:
        """Predicted length of the step in seconds."""
        return self.plan.step_s


def simulated(costs: PipelineCosts, plan: Plan) -> Simulated:
    """The plan with its predicted ``step_s``."""
    prediction = predict(costs, plan)
    return Simulated(plan.model_copy(update={"step_s": prediction.step_s}), prediction)


def predict(costs: PipelineCosts, plan: Plan) -> Prediction:
    """Simulate a step of the replica that ends last: the one with the most micro-batches, or a slower one.

    Of a plan whose pipelines are cut differently, a step of the first ones (``predictions``: of all).

    Of a long step only as many micro-batches are simulated as it takes the pipeline to get into its stride; each
    further one adds the bottleneck's time, or the pace seen if waiting made that slower (docs/planning.md).
    """
    first, _ = plan.kinds[0]
    return _longest(costs, plan, _most_of(plan, first), simulate)


def _longest(
    costs: PipelineCosts, alike: Plan, most: Mapping[float, int], simulates: Callable[..., StepTrace]
) -> Prediction:
    """The longest step of pipelines that are cut alike, by what ``_most_of`` says of them."""
    found = (
        replace(_predict_cut(costs.at_speed(speed), alike, count, simulates), speed=speed)
        for speed, count in most.items()
    )
    return max(found, key=attrgetter("step_s"))


def _most_of(plan: Plan, replicas: range) -> dict[float, int]:
    """By speed, the most micro-batches that one of these replicas has, which are cut alike."""
    if not plan.speeds:
        return {1.0: len(plan.micro_batches_of(replicas.start))}
    most: dict[float, int] = {}
    for replica in replicas:  # of equally fast ones the first has the most
        most.setdefault(plan.speed_of(replica), len(plan.micro_batches_of(replica)))
    return most


def predictions(plan: Plan, calibrations: Calibrations, *, gpus_per_vm: int | None = None) -> Sequence[Prediction]:
    """A step of each kind of pipelines of a plan: of the one that ends last.

    Args:
        plan: may have pipelines of several classes of devices.
        calibrations: of those classes.
        gpus_per_vm: instead of the calibrations'.
    """
    found = []
    for replicas, pipeline in plan.kinds:
        alike = plan.as_if_all(pipeline)
        known = partial(_costs_of_class, calibrations, plan, alike)
        costs, simulates = (
            spanning_costs(alike, known, gpus_per_vm=gpus_per_vm),
            simulate if plan.is_uniform else _simulate_again,
        )
        found.append(_longest(costs, alike, _most_of(plan, replicas), simulates))
    return found


def _costs_of_class(calibrations: Calibrations, plan: Plan, alike: Plan, name: str) -> Calibration:
    """Return the costs of one class of devices, with sums of several classes as fast as the slowest network.

    Messages of a pipeline, one of ``alike``, that reaches over several regions go over the network between regions.
    """
    known = calibrations.of(name)
    if len(plan.classes) < 2:
        return known
    if are_apart(alike.first.stage_classes):
        return known.model_copy(update={"across_vms": across_regions(calibrations)})
    networks = [calibrations.of(name).across_vms for name in plan.classes]
    if are_apart(plan.classes):
        networks.append(across_regions(calibrations))
    slowest = max(networks, key=lambda each: ring_s(each.rings, _SUMMED_BYTES, ranks=plan.replicas, in_flight=1))
    return known.model_copy(update={"across_vms": known.across_vms.model_copy(update={"rings": slowest.rings})})


_simulate_again = lru_cache(_REMEMBERED)(simulate)


def _predict_cut(
    costs: PipelineCosts, plan: Plan, micro_batches: int, simulates: Callable[..., StepTrace]
) -> Prediction:
    """Simulate a step of one pipeline, cut as the first of ``plan``, with so many micro-batches."""
    stages = len(costs.stages)
    least = plan.first.stash_limits[0] + _SIMULATED_TURNS * stages + plan.first.split_last
    count = min(micro_batches, max(least, _SIMULATED_FORWARDS // stages))
    limits = [min(limit, count) for limit in plan.first.stash_limits]
    trace = simulates(
        costs,
        micro_batches=count,
        policy=plan.policy,
        stash_limits=tuple(limits),
        split_last=min(plan.first.split_last, count),
        empties=plan.first.empties,
    )
    if count == micro_batches:
        return Prediction(trace=trace, repeated=0, pace_s=0.0)
    seen_s, backwards = _pace(trace, limits)
    is_known = backwards >= _MANY_BACKWARDS
    pace_s = seen_s if is_known else max(bottleneck_s(costs, stash_limits=plan.first.stash_limits), seen_s)
    return Prediction(trace=trace, repeated=micro_batches - count, pace_s=pace_s)


class _Seen(NamedTuple):
    """The work of a stage in the middle of the step."""

    busy: float
    """Share of the time in which it worked; 0 if that time is too short."""
    pace_s: float
    """Seconds per micro-batch."""
    backwards: int
    """Number of backwards that this was taken from."""


def _pace(trace: StepTrace, stash_limits: Sequence[int]) -> tuple[float, int]:
    """Seconds per micro-batch in the middle of the step, and the number of backwards that they were taken from.

    Micro-batches run through deep pipelines in waves, so that what a stage ends in some seconds says little. How busy
    the busiest one was says more: what a micro-batch takes it, over the share of the time in which it works.
    """
    stages = trace.costs.stages
    work_s = [stage.forward_s + stage.recompute_s + stage.backward_s for stage in stages]
    fullest = nlargest(_FULLEST, range(len(stages)), key=work_s.__getitem__)
    _, pace_s, backwards = max(_seen(trace, k, stash_limits[k]) for k in fullest)
    return pace_s, backwards


def _seen(trace: StepTrace, stage: int, in_flight: int) -> _Seen:
    """Measure a stage's work while forwards still came in, without the first half of that time."""
    row, costs = trace.rows[stage], trace.costs.stages[stage]
    backwards = [i for i, kind in enumerate(row.kinds) if kind is Kind.BACKWARD]
    last = len(backwards) - 1 - in_flight
    first = last // 2
    if last - first < _FEWEST_BACKWARDS:
        return _Seen(0.0, 0.0, 0)
    begin, end = backwards[first] + 1, backwards[last] + 1
    worked_s = sum(row.ends_s[begin:end]) - sum(row.starts_s[begin:end])
    passed_s = row.ends_s[end - 1] - row.ends_s[begin - 1]
    if not worked_s:
        return _Seen(0.0, 0.0, 0)
    spared = last - first - row.kinds[begin:end].count(Kind.RECOMPUTE)
    recomputes = 1 - spared / (last - first) if spared > _CHANCE else 1.0
    each_s = costs.forward_s + recomputes * costs.recompute_s + costs.backward_s
    return _Seen(worked_s / passed_s, each_s * passed_s / worked_s, last - first)
