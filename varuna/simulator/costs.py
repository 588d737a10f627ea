"""What the simulator is told about a pipeline. All durations in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage, per micro-batch; the all-reduce is once a step and starts at the stage's own end."""

    forward_s: float
    recompute_s: float
    backward_s: float
    allreduce_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """The link between a stage and the next, per micro-batch.

    Each direction is a FIFO of its own: a message occupies it for its serialisation, then travels for the
    latency.
    """

    latency_s: float = 0.0
    activation_s: float = 0.0
    gradient_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """One replica: P stages, P - 1 links, and the optimizer step after the slowest all-reduce."""

    stages: tuple[StageCosts, ...]
    links: tuple[LinkCosts, ...]
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.links) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages have one link less, not {len(self.links)} links")


def uniform(
    stages: int, *, forward_s: float = 1.0, backward_s: float = 2.0, link: LinkCosts | None = None
) -> PipelineCosts:
    """Equal stages with R = F; by default in units of one F, with links that take no time."""
    stage = StageCosts(forward_s=forward_s, recompute_s=forward_s, backward_s=backward_s)
    return PipelineCosts(stages=(stage,) * stages, links=(link or LinkCosts(),) * (stages - 1))
