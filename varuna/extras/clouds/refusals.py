"""Reasons why a cloud does not give what was asked for, and what to do next. Pure."""

from enum import Enum

from varuna.core.errors import FleetError
from varuna.fleet.engines.provider import CapacityError

_LONGEST = 300


class Refusal(Enum):
    """The reason for which a cloud does not do what it was asked."""

    THROTTLED = "asks to retry later"
    CAPACITY = "has no such machines now"
    QUOTA = "does not allow more: the quota is used up"
    EVICTED = "has taken machines back and does not replace them"
    FORBIDDEN = "refused, because permissions are missing"
    GONE = "knows no such group"
    FAULT = "has a fault of its own"
    WRONG = "did not accept the request"


_NEXT = {
    Refusal.CAPACITY: "Other sizes, zones or regions may have some",
    Refusal.QUOTA: "Raise the quota, or lower --nodes",
    Refusal.EVICTED: "Let the group delete what is evicted, and replace it",
    Refusal.FORBIDDEN: "Give the permissions to whoever runs this command",
    Refusal.GONE: "Check the names",
}
_FOR_GOOD = (Refusal.FORBIDDEN, Refusal.GONE, Refusal.WRONG)


def refused(cloud: str, why: Refusal, said: str, code: str = "") -> FleetError:
    """Return the error to raise: a CapacityError if asking again may help, a FleetError if only a person can.

    Args:
        cloud: its name.
        why: what stands in the way.
        said: the cloud's own words.
        code: the cloud's own name for it.
    """
    words = " ".join(said.split())[:_LONGEST].rstrip(".")
    text = f"{cloud} {why.value}: {words}" + (f" ({code})" if code and code not in words else "")
    following = _NEXT.get(why)
    return (FleetError if why in _FOR_GOOD else CapacityError)(f"{text}. {following}" if following else text)


def by_status(status: int) -> Refusal:
    """Return the refusal that an HTTP status stands for, where the cloud's own code says no more."""
    if status == 429:
        return Refusal.THROTTLED
    if status in (401, 403):
        return Refusal.FORBIDDEN
    if status == 404:
        return Refusal.GONE
    if status in (408, 409, 412) or status >= 500:
        return Refusal.FAULT if status >= 500 else Refusal.THROTTLED
    return Refusal.WRONG
