"""Costs of a pipeline, as the simulator is told them. All durations in seconds."""

import random
from dataclasses import dataclass, field, replace

from varuna.calibration.format import Jitter

# Shares of a whole B where nothing was measured: linears deferred in the graph.
INPUT_SHARE, WEIGHT_SHARE = 0.61, 0.40
_COMPUTED = ("forward_s", "recompute_s", "backward_s", "input_s", "weight_s", "record_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage, per micro-batch; the all-reduce is once a step and starts at the stage's own end."""

    forward_s: float
    """F that keeps what the plan keeps of every micro-batch"""
    recompute_s: float
    """of the sections that are not kept"""
    backward_s: float
    input_s: float = -1.0
    """I; by default 0.61 B"""
    weight_s: float = -1.0
    """W; by default 0.40 B"""
    record_s: float = -1.0
    """F of a micro-batch that is kept whole, for its B follows at once; by default ``forward_s``, and never less"""
    allreduce_s: float = 0.0
    """from the stage's own end to the end of its last all-reduce, if no message is in its way"""
    line_share: float = 0.0
    """of that time, for which sums also occupy the host's line, both ways; 0: they pass none"""
    keeps_all: bool = False
    """no section is recomputed: the stage has no R's, and ``recompute_s`` counts nothing"""
    stash_bytes: int = 0
    """held by a micro-batch in flight: its input, and the activations of kept sections"""
    live_bytes: int = 0
    """held by a micro-batch with all its activations, beyond ``stash_bytes``"""

    def __post_init__(self) -> None:
        if self.input_s < 0:
            object.__setattr__(self, "input_s", INPUT_SHARE * self.backward_s)
        if self.weight_s < 0:
            object.__setattr__(self, "weight_s", WEIGHT_SHARE * self.backward_s)
        object.__setattr__(self, "record_s", max(self.record_s, self.forward_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """The link between a stage and the next, per micro-batch.

    Each direction is a FIFO of its own: a message occupies it for its serialisation, then travels for the
    latency and the jitter. Messages that leave a host also pass its line, with all others that leave it and its sums,
    and the line of the host that they come to: stages between two such links share a host.
    """

    latency_s: float = 0.0
    early_s: float = 0.0
    """for which a message is under way before the action that gives it has ended: no longer than that takes"""
    activation_s: float = 0.0
    gradient_s: float = 0.0
    jitter: Jitter = field(default_factory=Jitter)
    line_share: float = 0.0
    """of its serialisation, for which a message also occupies the lines of both hosts; 0: it passes none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedCosts:
    """Stages that sum the gradients of a tied parameter once all of them have reduced their own."""

    stages: tuple[int, ...]
    exchange_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """One replica: P stages, P - 1 links, and the optimizer step after the slowest all-reduce."""

    stages: tuple[StageCosts, ...]
    links: tuple[LinkCosts, ...]
    tied: tuple[TiedCosts, ...] = ()
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.links) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages have one link less, not {len(self.links)} links")

    def at_speed(self, speed: float) -> "PipelineCosts":
        """The same with computation that takes 1 / speed times as long; links are what they are."""
        if speed == 1.0:
            return self
        stages = tuple(
            replace(stage, **{name: getattr(stage, name) / speed for name in _COMPUTED}) for stage in self.stages
        )
        return replace(self, stages=stages, optimizer_s=self.optimizer_s / speed)


def uniform(
    stages: int, *, forward_s: float = 1.0, backward_s: float = 2.0, link: LinkCosts | None = None
) -> PipelineCosts:
    """Equal stages with R = F and I = W = B / 2; by default in units of one F, with links that take no time.

    Args:
        stages: P.
        forward_s: F and R of a micro-batch.
        backward_s: B of a micro-batch.
        link: between any two neighbours.
    """
    half_s = backward_s / 2
    stage = StageCosts(
        forward_s=forward_s, recompute_s=forward_s, backward_s=backward_s, input_s=half_s, weight_s=half_s
    )
    return PipelineCosts(stages=(stage,) * stages, links=(link or LinkCosts(),) * (stages - 1))


def travel_times_s(link: LinkCosts, count: int, chance: random.Random | None) -> list[float]:
    """Latency and jitter of ``count`` messages; without ``chance`` each takes the jitter's mean."""
    jitter = link.jitter
    if chance is None or not (jitter.mean_s or jitter.quantiles_s):
        return [mean_travel_s(link)] * count
    if jitter.quantiles_s:
        return [link.latency_s + _quantile(jitter.quantiles_s, chance.random()) for _ in range(count)]
    rate = 1.0 / jitter.mean_s
    return [link.latency_s + chance.expovariate(rate) for _ in range(count)]


def mean_travel_s(link: LinkCosts) -> float:
    """Latency and the mean of the jitter, after a message's serialisation."""
    return link.latency_s + mean_delay_s(link.jitter)


def mean_delay_s(jitter: Jitter) -> float:
    """Mean delay: of the quantiles, if there are any."""
    quantiles = jitter.quantiles_s
    if not quantiles:
        return jitter.mean_s
    return (sum(quantiles) - (quantiles[0] + quantiles[-1]) / 2) / (len(quantiles) - 1)


def _quantile(quantiles: tuple[float, ...], probability: float) -> float:
    """Linear between the given ones."""
    position = probability * (len(quantiles) - 1)
    below = min(int(position), len(quantiles) - 2)
    return quantiles[below] + (quantiles[below + 1] - quantiles[below]) * (position - below)
