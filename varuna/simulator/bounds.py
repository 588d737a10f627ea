"""Closed forms around the simulation: what no schedule can beat, in O(P)."""

from collections.abc import Sequence

from varuna.simulator.channels import busiest_line_s
from varuna.simulator.costs import PipelineCosts, StageCosts, mean_travel_s


def lower_bounds_s(
    costs: PipelineCosts,
    *,
    micro_batches: int,
    stash_limits: Sequence[Sequence[int]],
    policy: str,
    split_last: int = 0,
) -> list[float]:
    """Seconds that a step takes at least under each of some limits, if no message is faster than the mean of its link.

    The largest of: each stage's and each link's own work between the way in of the first micro-batch and the
    way out of the last; and the round trips that a stage's in-flight limit forces one after the other.

    Args:
        costs: of stages and links.
        micro_batches: N of one replica.
        stash_limits: in-flight depths n_k by stage, once for each result.
        policy: one of ``varuna.schedule.policy.POLICIES``.
        split_last: how many of the last backwards run as I and W.
    """
    stages, links, n = costs.stages, costs.links, micro_batches
    paths = _Paths(costs, splits=split_last > 0)
    bound = 0.0
    limited = [0.0] * len(stash_limits)
    for k, stage in enumerate(stages):
        lead_s, tail_s, trip_s = paths.leads_s[k], paths.tails_s[k], paths.trips_s[k]
        halves = min(split_last, n) if k else 0  # stage 0 has nobody to send to and splits nothing
        whole_s = n * stage.forward_s + (n - halves) * stage.backward_s + halves * (stage.input_s + stage.weight_s)
        spares = policy == "adaptive"
        most_s = whole_s + paths.recomputes(k, n, whole_s) * stage.recompute_s if spares else 0.0
        for i, limits in enumerate(stash_limits):
            limit = limits[k]
            work_s = most_s if spares else whole_s + _recomputes(costs, k, n, limit) * stage.recompute_s
            put_off_s = min(halves, limit if stage.keeps_all else 1) * stage.weight_s  # at the result of the last I
            through_s = lead_s + max(work_s - put_off_s, -(-n // limit) * trip_s) + tail_s
            limited[i] = max(limited[i], lead_s + work_s + paths.sums_s[k], through_s)
    for k, link in enumerate(links):
        travel_s, beyond_s = paths.travels_s[k], paths.trips_s[k + 1]
        there_s = paths.leads_s[k] + stages[k].forward_s + n * link.activation_s + travel_s
        back_s = n * link.gradient_s + travel_s + paths.backwards_s[k]
        bound = max(bound, there_s + beyond_s + paths.tails_s[k + 1])
        bound = max(bound, paths.leads_s[k + 1] + beyond_s + back_s + paths.tails_s[k])
    return [max(bound, each) + costs.optimizer_s for each in limited]


def bottleneck_s(costs: PipelineCosts, *, stash_limits: Sequence[int]) -> float:
    """Seconds that each further micro-batch adds once the pipeline is full."""
    trips_s, last = _Paths(costs, splits=False).trips_s, len(costs.stages) - 1
    pace_s = 0.0
    for k, (stage, limit) in enumerate(zip(costs.stages, stash_limits, strict=True)):
        recompute_s = 0.0 if k == last or limit == 1 or stage.keeps_all else stage.recompute_s
        pace_s = max(pace_s, stage.forward_s + recompute_s + stage.backward_s, trips_s[k] / limit)
    messages_s = max((max(link.activation_s, link.gradient_s) for link in costs.links), default=0.0)
    return max(pace_s, messages_s, busiest_line_s(costs.links))


def _recomputes(costs: PipelineCosts, stage: int, micro_batches: int, limit: int) -> int:
    """R's that every policy but ``adaptive`` runs: the last micro-batch may be kept, on some stages all are."""
    keeps = stage == len(costs.stages) - 1 or limit == 1 or costs.stages[stage].keeps_all
    return 0 if keeps else micro_batches - 1


class _Paths:
    """Times through an empty pipeline, by stage. Where backwards may be split, the shorter form counts."""

    def __init__(self, costs: PipelineCosts, *, splits: bool) -> None:
        self._costs = costs
        stages, links = costs.stages, costs.links
        self.travels_s = travels_s = [mean_travel_s(link) - link.early_s for link in links]
        self.backwards_s = [
            min(stage.backward_s, stage.input_s) if splits and k else stage.backward_s for k, stage in enumerate(stages)
        ]
        """from the start of a backward to its result"""
        self.sums_s = [stage.allreduce_s for stage in stages]
        """from the stage's own end to its last sum, tied parameters included, whose other holders may be later"""
        for tied in costs.tied:
            for k in tied.stages:
                self.sums_s[k] += tied.exchange_s
        self.leads_s = [0.0]
        """earliest arrival of the first activation"""
        for stage, link, travel_s in zip(stages, links, travels_s, strict=False):
            self.leads_s.append(self.leads_s[-1] + stage.forward_s + link.activation_s + travel_s)
        self.tails_s = [self.sums_s[0]]
        """from the result of the last backward to the last sum of this stage or one before it"""
        behind = zip(stages[1:], self.sums_s[1:], links, travels_s, self.backwards_s, strict=False)
        for stage, sum_s, link, travel_s, back_s in behind:
            own_s = sum_s + (stage.weight_s if splits else 0.0)
            self.tails_s.append(max(own_s, link.gradient_s + travel_s + back_s + self.tails_s[-1]))
        self.trips_s = [0.0] * len(stages)
        """from the start of a micro-batch's F to the result of its backward, if nothing is in its way"""
        beyond_s = 0.0
        for k in range(len(stages) - 1, -1, -1):
            if k < len(links):
                beyond_s += links[k].activation_s + links[k].gradient_s + 2 * travels_s[k]
            beyond_s += stages[k].forward_s + self.backwards_s[k]
            self.trips_s[k] = beyond_s
        self._last_s = stages[-1].forward_s + _backward_s(stages[-1], splits=splits and len(stages) > 1)

    def recomputes(self, stage: int, micro_batches: int, work_s: float) -> float:
        """R's that even ``adaptive`` must run, besides ``work_s`` of F and backwards.

        A micro-batch that finds its stage empty keeps its activations. With g of those the step falls into g
        groups, each through before the next begins; one of x micro-batches takes a round trip and x - 1 times the
        last stage's work. Short groups save R's and lose time on the way: the least is where both bounds meet.
        """
        n, costs = micro_batches, self._costs.stages[stage]
        if costs.keeps_all:
            return 0.0
        gain_s = costs.recompute_s + self.trips_s[stage] - self._last_s
        groups = (work_s + n * (costs.recompute_s - self._last_s)) / gain_s if gain_s > 0 else n
        return n - min(max(groups, 1.0), n)


def _backward_s(stage: StageCosts, *, splits: bool) -> float:
    return min(stage.backward_s, stage.input_s + stage.weight_s) if splits else stage.backward_s
