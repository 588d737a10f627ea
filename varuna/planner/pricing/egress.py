"""Bytes that leave a region in a step, for which clouds charge. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from varuna.calibration.format import Calibration
from varuna.core.devices import region_of
from varuna.core.plan import Plan
from varuna.planner.pricing.profile import profile


def leaving_bytes(plan: Plan, calibration: Calibration) -> Mapping[str, float]:
    """By region, bytes that workers of it send to another one in a step.

    Sums go around a ring of the replicas; each rank sends 2 (D - 1) / D of them to the next. Messages leave a region
    where a pipeline reaches over several. Copies and state that moves are left out: they stay in a region if they can.

    Args:
        plan: for classes in regions.
        calibration: of the model, on any device.
    """
    found: defaultdict[str, float] = defaultdict(float)
    regions = [region_of(plan.class_of(rank)) for rank in range(plan.workers)]
    if len(set(regions)) < 2:
        return found
    figures, share = profile(calibration, plan.micro_batch), 2 * (plan.replicas - 1) / plan.replicas
    for section, size_bytes in enumerate(figures.reduced_bytes.values):
        homes = [regions[rank] for rank in plan.homes_of(section)]
        for here, after in zip(homes, [*homes[1:], homes[0]], strict=True):
            found[here] += share * size_bytes * (here != after)
    for replica in range(plan.replicas):
        starts, times = plan.cut_of(replica).starts, len(plan.micro_batches_of(replica))
        places = [regions[rank] for rank in plan.ranks_of(replica)]
        for (here, after), start in zip(pairwise(places), starts[1:], strict=True):
            if here != after:
                found[here] += times * figures.boundary_bytes[start - 1]
                found[after] += times * figures.gradient_boundary_bytes[start - 1]
    return found
