"""Transfers and their times: the record behind calibrations of links and behind timelines."""

from dataclasses import dataclass


@dataclass(slots=True)
class TransferTime:
    """A message, or a sum over the replicas; seconds of ``time.monotonic``."""

    size_bytes: int
    begin_s: float
    end_s: float | None = None
    """time at which the transport was through with it; None while it is under way"""

    @property
    def seconds(self) -> float:
        """Seconds that the transfer took; 0 while it is under way."""
        return 0.0 if self.end_s is None else self.end_s - self.begin_s
