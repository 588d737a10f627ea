"""The answer to a request for plans: those found, best first, and why others are missing."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from pydantic import Field

from varuna.core.plan import Plan
from varuna.core.value import Value
from varuna.planner.pricing.predict import Prediction, Simulated


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

    plans: tuple[Plan, ...] = ()
    """Simulated, best first."""
    predictions: tuple[Prediction, ...] = ()
    """Predictions of these plans, in their order."""
    outpaced: tuple[PrunedPlan, ...] = ()
    rejected: tuple[Rejection, ...] = ()

    @property
    def found(self) -> list[Simulated]:
        """Plans with their predictions, best first."""
        return list(map(Simulated, self.plans, self.predictions))

    def best_of(self, replicas: int) -> Simulated | None:
        """The best plan with so many replicas, if there is one."""
        return next((each for each in self.found if each.plan.replicas == replicas), None)

    def of(self, found: Collection[Simulated]) -> "Ranking":
        """The same with these plans instead."""
        plans, predictions = (tuple(each.plan for each in found), tuple(each.prediction for each in found))
        return replace(self, plans=plans, predictions=predictions)
