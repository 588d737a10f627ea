"""Machines of a run, beyond whether they are heard: where they are, which leave, and what of them has failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna.fleet.state.persistent import PersistentMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A node is about to leave."""

    deadline_s: float
    """Infinite if there is no hurry."""
    reason: str
    released: bool = False
    """The run does not need it any more."""

    @property
    def is_drain(self) -> bool:
        """Whether somebody wants the node back, and nobody takes it away."""
        return self.deadline_s == float("inf")


@dataclass(frozen=True, slots=True)
class Risk:
    """A node may be taken away soon; spares on other nodes are better."""

    reason: str
    replaced: bool = False
    """A morph to spares was asked for; another would not go better."""


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
        """Share of devices' memory that plans fill."""
        return 0.9**self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A worker of one machine says that it cannot reach one of another."""

    worker: str
    other: str
    times: int
    """Generations that broke by it, one after the other."""
    generation: int
    """The newest of them."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines, as clouds, people and faults tell of them."""

    zones: PersistentMap[str] = field(default_factory=PersistentMap)
    """By node, where that is known: its region, a slash and its zone, or one name for both."""
    departing: Mapping[str, Departure] = field(default_factory=dict)
    """By node."""
    at_risk: Mapping[str, Risk] = field(default_factory=dict)
    broken: Mapping[str, BrokenDevice] = field(default_factory=dict)
    """By name of a device: those that failed."""
    short: Mapping[str, ShortMemory] = field(default_factory=dict)
    """By class of device: those whose workers ran out of memory."""
    silences: Mapping[tuple[str, str], Silence] = field(default_factory=dict)
    """By machine that says so, and machine that it cannot reach."""
