"""From facts of a model and a calibration to the predicted time of a step."""

from collections.abc import Sequence
from itertools import pairwise

from varuna.core.calibration import Calibration
from varuna.core.model import ModelFacts
from varuna.schedule.actions import Kind
from varuna.simulator.bounds import bottleneck_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts
from varuna.simulator.step import StepTrace, simulate

_SIMULATED_FORWARDS = 6_000  # over all stages; with their R and B some 0.1 s
_FEWEST_GAPS = 8  # between backwards, for a pace to mean something


def pipeline_costs(
    model: ModelFacts, starts: Sequence[int], *, replicas: int, micro_batch: int, calibration: Calibration
) -> PipelineCosts:
    """Costs of one replica whose stages begin with the sections ``starts``."""
    spans = [range(start, end) for start, end in pairwise((*starts, len(model.sections)))]
    extra = _tied_exchange_s(model, spans, calibration)
    return PipelineCosts(
        stages=tuple(
            _stage_costs(
                model, span, replicas=replicas, micro_batch=micro_batch, extra_s=extra_s, calibration=calibration
            )
            for span, extra_s in zip(spans, extra, strict=True)
        ),
        links=tuple(
            _link_costs(model.sections[span.start - 1].boundary_bytes * micro_batch, calibration) for span in spans[1:]
        ),
    )


def predict_step_s(costs: PipelineCosts, *, micro_batches: int, policy: str, stash_limits: Sequence[int]) -> float:
    """Simulated seconds of a step.

    Of a long step only the beginning is simulated, until the pipeline is in its stride; each further
    micro-batch adds the bottleneck's time, or the pace seen if waiting made that slower. Error against the
    full simulation: below 2 % while a message takes less than an F (below 1 % for Varuna), 6 % at 20 F.
    """
    stages = len(costs.stages)
    count = min(micro_batches, max(4 * stages, _SIMULATED_FORWARDS // stages))
    limits = [min(limit, count) for limit in stash_limits]
    trace = simulate(costs, micro_batches=count, policy=policy, stash_limits=limits)
    if count == micro_batches:
        return trace.step_s
    pace_s = max(bottleneck_s(costs, stash_limits=stash_limits), _pace_s(trace, in_flight=limits[0]))
    return trace.step_s + (micro_batches - count) * pace_s


def _pace_s(trace: StepTrace, *, in_flight: int) -> float:
    """Seconds between B's of stage 0 while forwards still come in, the first of them left out."""
    ends = [entry.end_s for entry in trace.timeline[0] if entry.action.kind is Kind.BACKWARD]
    last = len(ends) - 1 - in_flight
    first = last // 2
    return (ends[last] - ends[first]) / (last - first) if last - first >= _FEWEST_GAPS else 0.0


def ring_s(size_bytes: float, ranks: int, calibration: Calibration) -> float:
    """Ring all-reduce: 2 (D - 1) rounds, each of 1 / D of the buffer."""
    rounds = 2 * (ranks - 1)
    return rounds * (calibration.link_latency_s + size_bytes / ranks / calibration.allreduce_bytes_per_s)


def _stage_costs(
    model: ModelFacts, span: range, *, replicas: int, micro_batch: int, extra_s: float, calibration: Calibration
) -> StageCosts:
    compute_s = sum(model.sections[i].forward_s for i in span) * micro_batch
    gradient_bytes = sum(model.sections[i].trainable_bytes for i in span)
    return StageCosts(
        forward_s=compute_s + calibration.action_overhead_s,
        recompute_s=compute_s + calibration.action_overhead_s,
        backward_s=compute_s * calibration.backward_factor + calibration.action_overhead_s,
        allreduce_s=ring_s(gradient_bytes, replicas, calibration) + extra_s,
    )


def _link_costs(message_bytes: int, calibration: Calibration) -> LinkCosts:
    serialisation_s = message_bytes / calibration.link_bytes_per_s
    return LinkCosts(latency_s=calibration.link_latency_s, activation_s=serialisation_s, gradient_s=serialisation_s)


def _tied_exchange_s(model: ModelFacts, spans: Sequence[range], calibration: Calibration) -> list[float]:
    """By stage: seconds to sum the gradients of tied parameters with the other stages that hold them."""
    seconds = [0.0] * len(spans)
    for tied in model.tied:
        holders = [k for k, span in enumerate(spans) if any(section in span for section in tied.sections)]
        for k in holders:
            seconds[k] += ring_s(tied.size_bytes, len(holders), calibration)
    return seconds
