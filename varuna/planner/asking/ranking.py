"""The answer to a request for plans: those found, best first, and why others are missing."""

from dataclasses import dataclass

from pydantic import Field

from varuna.core.plan import Plan
from varuna.core.value import Value
from varuna.planner.pricing.predict import Prediction


class Rejection(Value):
    """A depth that cannot run."""

    stages: int = Field(description="P")
    replicas: int = Field(description="D that the workers would allow")
    micro_batch: int | None = Field(default=None, description="smallest m tried; None if memory is not why")
    device_class: str = Field(default="", description="of the workers, where there are several")
    reason: str
    missing_bytes: int | None = Field(default=None, description="at the worst stage; None if memory is not why")


class PrunedPlan(Value):
    """A plan that was not simulated: its bound cannot win."""

    stages: int
    replicas: int
    micro_batch: int
    at_least_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The result of ranking plans: those found, those outpaced, those rejected."""

    plans: tuple[Plan, ...]
    """Simulated, best first."""
    predictions: tuple[Prediction, ...]
    """Predictions of these plans, in their order."""
    outpaced: tuple[PrunedPlan, ...]
    rejected: tuple[Rejection, ...]
