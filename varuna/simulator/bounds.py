"""Closed forms around the simulation: what no schedule can beat, in O(P)."""

from collections.abc import Sequence

from varuna.simulator.costs import PipelineCosts


def lower_bound_s(costs: PipelineCosts, *, micro_batches: int, stash_limits: Sequence[int]) -> float:
    """Seconds that a step takes at least, whatever the policy and the jitter.

    The largest of: each stage's and each link's own work between the way in of the first micro-batch and the
    way out of the last; and the round trips that a stage's in-flight limit forces one after the other.
    """
    stages, links, n = costs.stages, costs.links, micro_batches
    lead, tail, turn = _leads(costs), _tails(costs), _round_trips(costs)
    bound = 0.0
    for k, stage in enumerate(stages):
        work = n * (stage.forward_s + stage.backward_s) + _recomputes(costs, k, n, stash_limits[k]) * stage.recompute_s
        trips = -(-n // stash_limits[k]) * turn[k]
        bound = max(bound, lead[k] + max(work, trips) + tail[k])
    for k, link in enumerate(links):
        there = lead[k] + stages[k].forward_s + n * link.activation_s + link.latency_s + turn[k + 1] + tail[k + 1]
        back = lead[k + 1] + turn[k + 1] + n * link.gradient_s + link.latency_s + stages[k].backward_s + tail[k]
        bound = max(bound, there, back)
    return bound + costs.optimizer_s


def bottleneck_s(costs: PipelineCosts, *, stash_limits: Sequence[int]) -> float:
    """Seconds that each further micro-batch adds once the pipeline is full."""
    turn, last = _round_trips(costs), len(costs.stages) - 1
    pace = 0.0
    for k, (stage, limit) in enumerate(zip(costs.stages, stash_limits, strict=True)):
        recompute_s = 0.0 if k == last or limit == 1 else stage.recompute_s
        pace = max(pace, stage.forward_s + recompute_s + stage.backward_s, turn[k] / limit)
    return max(pace, *(max(link.activation_s, link.gradient_s) for link in costs.links), 0.0)


def _recomputes(costs: PipelineCosts, stage: int, micro_batches: int, limit: int) -> int:
    """R's that no policy spares: all may keep the last micro-batch; the last stage, or a lone one, all of them."""
    return 0 if stage == len(costs.stages) - 1 or limit == 1 else micro_batches - 1


def _leads(costs: PipelineCosts) -> list[float]:
    """Earliest arrival of the first activation at each stage."""
    leads = [0.0]
    for stage, link in zip(costs.stages, costs.links, strict=False):
        leads.append(leads[-1] + stage.forward_s + link.activation_s + link.latency_s)
    return leads


def _tails(costs: PipelineCosts) -> list[float]:
    """From the end of each stage's last B to the end of the last all-reduce of it or a stage before it."""
    tails = [costs.stages[0].allreduce_s]
    for before, link, stage in zip(costs.stages, costs.links, costs.stages[1:], strict=False):
        tails.append(max(stage.allreduce_s, link.gradient_s + link.latency_s + before.backward_s + tails[-1]))
    return tails


def _round_trips(costs: PipelineCosts) -> list[float]:
    """From the start of a micro-batch's F on each stage to the end of its B there, if nothing is in its way."""
    trips = [costs.stages[-1].forward_s + costs.stages[-1].backward_s]
    for stage, link in zip(reversed(costs.stages[:-1]), reversed(costs.links), strict=True):
        travel = link.activation_s + link.gradient_s + 2 * link.latency_s
        trips.append(stage.forward_s + travel + trips[-1] + stage.backward_s)
    return trips[::-1]
