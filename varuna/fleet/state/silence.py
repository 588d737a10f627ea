"""The manager's memory of two machines between which nothing gets through."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A worker of one machine says that it cannot reach one of another."""

    worker: str
    other: str
    times: int
    """Generations that broke by it, one after the other."""
    generation: int
    """The newest of them."""
