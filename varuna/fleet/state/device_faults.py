"""The manager's memory of devices that failed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenDevice:
    """A GPU or a machine that failed, or may have, and gets no worker for a while."""

    error: str
    step: int
    """That was in flight."""
    generation: int
    workers: tuple[str, ...]
    """That ended by its newest fault."""
    faults: int
    """So far."""
    until_s: float
    """Time from which the device may have a worker again."""
    may_be_code: bool = False
    """Its error does not say whose matter it is."""
    accused: str = ""
    """Machine that has read other samples than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortMemory:
    """Plans for a class of devices fill less than what these seemed to have."""

    times: int
    """Number of times that ``part`` was lowered."""
    generation: int
    """In which it was lowered last: all ranks of a stage run out of memory at once."""

    @property
    def part(self) -> float:
        """Of what devices have that plans fill."""
        return 0.9**self.times
