"""The times and sizes of requests for nodes: the user's bounds, and patience with a cloud that has none. Pure."""

from dataclasses import dataclass, replace

from varuna.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthConfig:
    """The user's bounds, and how often to ask."""

    least: int = 0
    most: int
    every_s: float = 30.0
    """Seconds between two looks at a group that has the requested size."""
    first_backoff_s: float = 15.0
    most_backoff_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise UsageError(
                f"bounds of {self.least} to {self.most} nodes are invalid: 0 <= least <= most and most > 0 are needed."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The newest request for nodes, and the time of the next one."""

    config: GrowthConfig
    wanted: int = 0
    asked: int | None = None
    next_s: float = 0.0
    refusals: int = 0

    def request_nodes(self, nodes: int, now_s: float) -> "Growth":
        """Ask for this many; within the bounds at once, unless the cloud has just refused."""
        wanted = min(max(nodes, self.config.least), self.config.most)
        if wanted == self.wanted:
            return self
        return replace(self, wanted=wanted, next_s=self.next_s if self.refusals else now_s)

    def due(self, now_s: float) -> bool:
        """Whether to ask now."""
        return now_s >= self.next_s

    def granted(self, size: int, now_s: float) -> "Growth":
        """Note an accepted request; ``size`` nodes exist so far. A group that stays too small is asked less often."""
        if size >= self.wanted:
            return replace(self, asked=self.wanted, refusals=0, next_s=now_s + self.config.every_s)
        return self._wait(now_s)

    def refused(self, now_s: float) -> "Growth":
        """Note that there is no capacity."""
        return self._wait(now_s)

    def _wait(self, now_s: float) -> "Growth":
        backoff_s = min(self.config.first_backoff_s * 2.0**self.refusals, self.config.most_backoff_s)
        return replace(self, asked=self.wanted, refusals=self.refusals + 1, next_s=now_s + backoff_s)
