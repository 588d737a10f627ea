"""The results of a replay."""

from pydantic import Field

from varuna.core.plan import Plan
from varuna.core.value import Value


class Stretch(Value):
    """A time in which the same workers run the same plan, or none."""

    begin_s: float
    end_s: float
    nodes: int = Field(description="alive at its beginning")
    plan: Plan | None = Field(default=None, description="None while a morph is under way, or nothing fits")
    kind: str = Field(description="start, loss, gain, notice, same-plan, rollback: what began it")


class ReplayOutcome(Value):
    """Totals of one policy on one trace."""

    policy: str
    global_batch: int
    micro_batch: int
    duration_s: float
    steps: int = Field(description="committed and not undone")
    samples: int
    ideal_samples: float = Field(description="of instant, lossless morphs, always on the best plan")
    steps_redone: int = Field(description="broken off in flight, or undone by a rollback")
    micro_batches: int = Field(description="of a step")
    micro_batches_kept: int = Field(
        default=0, description="of steps broken off in flight: those that did not run again"
    )
    morphs: dict[str, int] = Field(description="by kind")
    lost: dict[str, float] = Field(
        default_factory=dict, description="by cause, as a share of ideal_samples; with the goodput, they add up to 1"
    )
    plans: dict[str, float] = Field(description="share of the time by P x D")
    training_share: float = Field(description="share of the time in which a step was running")
    gpu_hours: float
    dollars: float | None = Field(default=None, description="if the calibration has a price")
    stretches: tuple[Stretch, ...] = ()
    checkpoints_s: tuple[float, ...] = Field(default=(), description="when checkpoints were complete")

    @property
    def goodput(self) -> float:
        """Committed samples divided by those of an ideal run."""
        return self.samples / self.ideal_samples if self.ideal_samples else 0.0

    def describe(self) -> dict[str, object]:
        """Everything but the stretches, for ``--json``."""
        figures = self.model_dump(exclude={"stretches", "checkpoints_s"})
        return {"goodput": round(self.goodput, 4), **figures, "checkpoints": len(self.checkpoints_s)}
