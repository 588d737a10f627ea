"""The line that a plan needs: the lowest speed at which compute sets the pace. Pure.

A step is predicted with the calibrated network at other speeds, its latency as it is. What is asked of a line depends
on the schedule, on how much traffic compute hides, and on how many ranks share the line, so it is no formula.
"""

from functools import lru_cache

from pydantic import Field

from varuna.calibration.format import NetworkCosts
from varuna.core.plan import Plan
from varuna.core.units import format_line
from varuna.core.value import Value
from varuna.planner.asking.request import PlanRequest
from varuna.planner.pricing.predict import predictions

HARDLY = 1.02
"""Of the step on a line without end: as fast as that."""
_DOUBLINGS, _CLOSE = 14, 0.125
"""Doublings by which a line is tried faster and slower, and the part of a doubling to which the answer is exact."""
_TENTH = 0.1


class Line(Value):
    """The line between VMs that a plan needs, and its step on others."""

    found_bits_per_s: float = Field(description="of a VM's line, each way, as calibrated")
    needed_bits_per_s: float | None = Field(description="at least, for compute to set the pace; null: none is enough")
    faster: float = Field(description="step time on a line without end, over that on the one found")
    at_a_tenth: float = Field(description="step time on a tenth of the line, over that on the one found")

    @property
    def is_enough(self) -> bool:
        """Whether compute sets the pace on the line found."""
        return self.needed_bits_per_s is not None and self.needed_bits_per_s <= self.found_bits_per_s

    def in_words(self) -> str:
        """Say which line the plan needs, and how fast its step is on others."""
        found, needed = format_line(self.found_bits_per_s), self.needed_bits_per_s
        tenth = (
            f"on {format_line(_TENTH * self.found_bits_per_s)} its step would take {self.at_a_tenth:.2g} times as long"
        )
        if needed is not None and self.is_enough:
            return f"lines of {found} are enough: from {format_line(needed)} on compute sets the pace; {tenth}"
        wanted = "" if needed is None else f" (from {format_line(needed)} on)"
        return f"lines of {found} set the pace: faster ones{wanted} would save {1 - self.faster:.0%} of a step; {tenth}"


def line_of(plan: Plan, request: PlanRequest) -> Line | None:
    """Find the line between VMs that a plan needs; None: nothing leaves one.

    Args:
        plan: of the request.
        request: with the calibration that it was made for.
    """
    if plan.workers <= request.vm_size:
        return None

    @lru_cache(None)
    def step_s(factor: float) -> float:
        calibrations = request.calibrations.each(
            lambda known: known.model_copy(update={"across_vms": _times(known.across_vms, factor)})
        )
        return max(each.step_s for each in predictions(plan, calibrations, gpus_per_vm=request.vm_size))

    link = request.calibrations.of(next(iter(plan.classes), "")).across_vms.link
    found, fastest = 8 * (link.line_bytes_per_s or link.bytes_per_s), step_s(2.0**_DOUBLINGS)
    low, high = -float(_DOUBLINGS), float(_DOUBLINGS)
    if step_s(2.0**low) <= HARDLY * fastest:
        high = low  # hardly anything crosses
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if step_s(2.0**middle) <= HARDLY * fastest else (middle, high)
    return Line(
        found_bits_per_s=found,
        needed_bits_per_s=found * 2.0**high if high < _DOUBLINGS else None,
        faster=fastest / step_s(1.0),
        at_a_tenth=step_s(_TENTH) / step_s(1.0),
    )


def _times(network: NetworkCosts, factor: float) -> NetworkCosts:
    link = network.link.at(latency_s=network.link.latency_s, bytes_per_s=factor * network.link.bytes_per_s)
    rings = tuple(each.at(latency_s=each.latency_s, bytes_per_s=factor * each.bytes_per_s) for each in network.rings)
    return network.model_copy(update={"link": link, "rings": rings})
