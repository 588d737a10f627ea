"""Bytes that leave a region or a zone in a step, for which clouds charge. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from varuna.calibration.format import Calibration
from varuna.core.plan import Plan
from varuna.planner.pricing.profile import profile


def crossing_bytes(plan: Plan, calibration: Calibration, places: Sequence[str]) -> Mapping[tuple[str, str], float]:
    """By place that sends and place that receives, bytes that workers of one send to the other in a step.

    Sums go around a ring of the replicas; each rank sends 2 (D - 1) / D of them to the next. Messages cross where a
    pipeline reaches over several places. Copies and state that moves are left out: they stay in a region if they can.

    Args:
        plan: of the ranks.
        calibration: of the model, on any device.
        places: of each rank.
    """
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    if len(set(places)) < 2:
        return found
    figures, share = profile(calibration, plan.micro_batch), 2 * (plan.replicas - 1) / plan.replicas
    for section, size_bytes in enumerate(figures.reduced_bytes.values):
        homes = [places[rank] for rank in plan.homes_of(section)]
        for here, after in zip(homes, [*homes[1:], homes[0]], strict=True):
            if here != after:
                found[here, after] += share * size_bytes
    for replica in range(plan.replicas):
        starts, times = plan.pipeline_of(replica).starts, len(plan.micro_batches_of(replica))
        own = [places[rank] for rank in plan.ranks_of(replica)]
        for (here, after), start in zip(pairwise(own), starts[1:], strict=True):
            if here != after:
                found[here, after] += times * figures.boundary_bytes[start - 1]
                found[after, here] += times * figures.gradient_boundary_bytes[start - 1]
    return found


def seated(plan: Plan, workers: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """The place of each rank, if pipelines stay in one where they can, and neighbours in the ring are together.

    Args:
        plan: of no more workers of a class than there are.
        workers: their number by class of devices and place; a plan for any workers has the first class.
    """
    left = {name: Counter(places) for name, places in workers.items()}
    found, place = list[str](), ""
    for replica in range(plan.replicas):
        names = [plan.class_of(rank) if plan.is_by_class else next(iter(left)) for rank in plan.ranks_of(replica)]
        everywhere = {each for name in names for each in left[name]}
        whole = [each for each in sorted(everywhere) if all(left[n][each] >= c for n, c in Counter(names).items())]
        if whole and place not in whole:
            place = max(whole, key=lambda each: min(left[name][each] for name in names))
        for name in names:
            if not left[name][place]:
                place = max(left[name], key=left[name].__getitem__)
            found.append(place)
            left[name][place] -= 1
    return tuple(found)
