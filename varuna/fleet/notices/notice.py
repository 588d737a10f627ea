"""What a cloud says of this machine: where it is, that it will be taken back, or that it may be. Pure."""

from dataclasses import dataclass

LEAST_LEAD_S = 20.0
"""Who has just been told still has some seconds: a time that has passed is another clock's."""


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """This machine will be taken back."""

    action: str
    """In the cloud's words: terminate, Preempt, ..."""
    in_s: float
    """Seconds from now, at least ``LEAST_LEAD_S``."""

    @staticmethod
    def at(action: str, at_s: float, now_s: float) -> "SpotNotice":
        """For a time by the wall clock."""
        return SpotNotice(action, max(LEAST_LEAD_S, at_s - now_s))


@dataclass(frozen=True, slots=True)
class RebalanceAdvice:
    """This machine is more likely than others to be taken back soon; it may also stay for days."""

    reason: str


@dataclass(frozen=True, slots=True)
class Preemptible:
    """This machine was rented as one that the cloud may take back at any time."""


@dataclass(frozen=True, slots=True)
class ZoneNotice:
    """Where this machine is."""

    zone: str
    """Its region, a slash and its zone, such as ``us-east-1/us-east-1a``."""


CloudNotice = SpotNotice | RebalanceAdvice | Preemptible | ZoneNotice
