"""The predicted time of a plan's step, and what it is spent on."""

from dataclasses import dataclass

from varuna.core.plan import Plan
from varuna.schedule.actions import Kind
from varuna.simulator.bounds import bottleneck_s
from varuna.simulator.costs import PipelineCosts
from varuna.simulator.step import simulate
from varuna.simulator.trace import StepTrace

_SIMULATED_FORWARDS = 2_000  # over all stages; with their R and B some 10 ms
_SIMULATED_TURNS = 2  # micro-batches per stage beyond those in flight: until the pipeline is in its stride
_FEWEST_GAPS = 8  # between backwards, for a pace to mean something
_MANY_GAPS = 128  # for it to be the truth, even below the bottleneck's time: idle stages spare R's


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated step; of a long one the beginning and the end, with micro-batches in between that repeat."""

    trace: StepTrace
    repeated: int
    """Micro-batches that were not simulated."""
    pace_s: float
    """Of each of them."""

    @property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of the optimizer step."""
        return self.trace.step_s + self.repeated * self.pace_s

    @property
    def breakdown(self) -> "Breakdown":
        """What the average GPU spends the step on."""
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
    """All-reduces behind the last backward of the pipeline; the others are hidden."""
    optimizer_s: float
    idle_s: float
    """Idle while what runs next is not made yet: filling, draining, uneven stages."""

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time, up to its last backward, in which the average GPU does not compute."""
        span_s = self.compute_s + self.transfer_s + self.idle_s
        return (self.transfer_s + self.idle_s) / span_s if span_s else 0.0


def predict(costs: PipelineCosts, plan: Plan) -> Prediction:
    """Simulate a step of the replica with the most micro-batches.

    Of a long step only as many micro-batches are simulated as it takes the pipeline to get into its stride; each
    further one adds the bottleneck's time, or the pace seen if waiting made that slower. Against full simulations
    of 100 random pipelines up to 36 x 720 that is 0.14 % off on average and 3.3 % at most.
    """
    stages, micro_batches = len(costs.stages), len(plan.micro_batches_of(0))
    least = plan.stash_limits[0] + _SIMULATED_TURNS * stages + plan.split_last
    count = min(micro_batches, max(least, _SIMULATED_FORWARDS // stages))
    limits = [min(limit, count) for limit in plan.stash_limits]
    trace = simulate(
        costs,
        micro_batches=count,
        policy=plan.policy,
        stash_limits=limits,
        split_last=min(plan.split_last, count),
    )
    if count == micro_batches:
        return Prediction(trace=trace, repeated=0, pace_s=0.0)
    seen_s, gaps = _pace(trace, in_flight=limits[0])
    pace_s = seen_s if gaps >= _MANY_GAPS else max(bottleneck_s(costs, stash_limits=plan.stash_limits), seen_s)
    return Prediction(trace=trace, repeated=micro_batches - count, pace_s=pace_s)


def _pace(trace: StepTrace, *, in_flight: int) -> tuple[float, int]:
    """Mean gap between B's of stage 0 while forwards still come in, the first half left out; and how many."""
    row = trace.rows[0]
    ends = [end_s for kind, end_s in zip(row.kinds, row.ends_s, strict=True) if kind is Kind.BACKWARD]
    last = len(ends) - 1 - in_flight
    first = last // 2
    gaps = last - first
    return ((ends[last] - ends[first]) / gaps, gaps) if gaps >= _FEWEST_GAPS else (0.0, 0)
