"""Facts about a machine's place and future: one value from a cloud's word to the rule that acts on it. Pure."""

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from varuna.core.devices import MAX_ZONE, ZONE
from varuna.core.value import Value

LEAST_LEAD_S: Final = 20.0
"""A machine that has just been told still has some seconds: a time that has passed is another clock's."""
MAX_REASON: Final = 1000
"""Most characters of a reason."""

Reason = Annotated[str, BeforeValidator(lambda text: text[:MAX_REASON])]
"""A reason in words. A cloud may say anything, so it is cut."""


class PreemptionNotice(Value):
    """Notice that this machine will be taken away."""

    kind: Literal["preemption"] = "preemption"
    in_s: float = Field(ge=0, allow_inf_nan=False)
    """Seconds from now."""
    reason: Reason


class RebalanceAdvice(Value):
    """Notice that this machine is more likely than others to be taken back soon; it may also stay for days."""

    kind: Literal["rebalance"] = "rebalance"
    reason: Reason


class Preemptible(Value):
    """Notice that this machine was rented as one that the cloud may take back at any time."""

    kind: Literal["preemptible"] = "preemptible"


class ZoneNotice(Value):
    """Notice that this machine is in a zone."""

    kind: Literal["zone"] = "zone"
    zone: str = Field(pattern=ZONE, max_length=MAX_ZONE)
    """Its region, a slash and its zone, such as ``us-east-1/us-east-1a``, or one name for both."""


NodeNotice = PreemptionNotice | RebalanceAdvice | Preemptible | ZoneNotice


def spot_notice(action: str, in_s: float) -> PreemptionNotice:
    """Make the notice of a cloud, in its own words (terminate, Preempt, ...)."""
    return PreemptionNotice(in_s=in_s, reason=f"spot notice: {action}")


def spot_notice_at(action: str, at_s: float, now_s: float) -> PreemptionNotice:
    """Make the notice of a cloud that names a time by the wall clock."""
    return spot_notice(action, max(LEAST_LEAD_S, at_s - now_s))
