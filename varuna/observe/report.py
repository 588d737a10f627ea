"""The report of a run, from its events: generations, morphs, losses."""

from typing import NamedTuple

from pydantic import Field

from varuna.core.plan import Copies, Plan
from varuna.core.value import Value
from varuna.fleet.state.run_events import (
    GenerationRecord,
    GenerationStarted,
    Morphed,
    RunEvent,
    StepRecorded,
    TrainingEnded,
    WorkerLost,
)
from varuna.observe.predictions import CheckedPrediction, PredictionBook


class PlanShape(Value):
    """The numbers of a plan that reports show."""

    stages: int
    replicas: int
    micro_batch: int
    micro_batches: int
    shape: str = Field(description="``2x3``, or ``4x1+3x2``")
    ranks: int = Field(description="workers with a seat")

    @classmethod
    def of(cls, plan: Plan) -> "PlanShape":
        """Return the shape of ``plan``."""
        return cls(
            stages=plan.stages,
            replicas=plan.replicas,
            micro_batch=plan.micro_batch,
            micro_batches=plan.micro_batches,
            shape=plan.shape,
            ranks=plan.workers,
        )

    def __str__(self) -> str:
        return self.shape


class GenerationRow(Value):
    """One generation, as reports and the closing table show it."""

    generation: int
    plan: PlanShape
    copies: Copies = Field(default=Copies.NONE, description="of each stage's state or sums, in another worker's memory")
    streams_frozen: bool = Field(default=False, description="parameters that are not trained rest in host memory")
    cause: str
    workers: int = Field(description="members when it began, spares included")
    first_step: int
    recovery_seconds: float | None = Field(description="from the cause to the end of its first step")
    steps_redone: int
    kept_micro_batches: int = Field(default=0, description="of the step in flight: those that did not run again")

    @classmethod
    def of(cls, record: GenerationRecord) -> "GenerationRow":
        """Return the row of ``record``."""
        return cls(
            generation=record.generation,
            plan=PlanShape.of(record.plan),
            copies=record.plan.copies,
            streams_frozen=record.plan.streams_frozen,
            cause=record.cause,
            workers=len(record.members),
            first_step=record.first_step,
            recovery_seconds=None if record.recovery_seconds is None else round(record.recovery_seconds, 3),
            steps_redone=record.steps_redone,
            kept_micro_batches=record.kept_micro_batches,
        )


class Morph(NamedTuple):
    """A finished morph, or one that the next overtook (``after.recovery_seconds`` is None then)."""

    before: GenerationRow
    after: GenerationRow


class RunHistory:
    """Collects what a report needs; a step that runs again replaces its earlier record."""

    def __init__(self) -> None:
        self.generations: list[GenerationRow] = []
        self.losses: dict[int, float] = {}
        """By step, of the newest training of the script; a manager that has started again knows the newest ones."""
        self._first: int | None = None  # step of that training
        self.trainings = self.earlier_steps = 0
        """Trainings that were over before it, and their steps."""
        self.morphs = self.lost = 0
        self._open = False
        self._predictions = PredictionBook()

    @property
    def prediction(self) -> CheckedPrediction | None:
        """The newest one that steps have followed; None: there is none yet."""
        checked = self._predictions.checked
        return checked[-1] if checked else None

    def add_event(self, event: RunEvent) -> Morph | None:
        """Note an event; returns the morph that it completes, or that it overtakes."""
        self._predictions.add_event(event)
        match event:
            case GenerationStarted(record=record):
                overtaken = Morph(*self.generations[-2:]) if self._open else None
                self._open = record.generation > record.began
                self._first = record.first_step if self._first is None else min(self._first, record.first_step)
                self.generations.append(GenerationRow.of(record))
                return overtaken
            case Morphed(record=record):
                self._open = False
                self.morphs += 1
                self.generations[-1] = GenerationRow.of(record)
                return Morph(*self.generations[-2:])
            case StepRecorded(step=step, loss=loss):
                self.losses[step] = loss
            case TrainingEnded(steps=steps):
                self.trainings, self.earlier_steps = self.trainings + 1, self.earlier_steps + steps
                self.losses, self._open, self._first = {}, False, None
            case WorkerLost():
                self.lost += 1
            case _:
                pass
        return None

    @property
    def steps(self) -> int:
        """Steps of all trainings."""
        newest = max(self.losses, default=-1)
        first = min(self.losses, default=0) if self._first is None else self._first
        return self.earlier_steps + max(0, newest + 1 - first)

    def curve(self, steps: int) -> list[float]:
        """Return the losses of steps 0 to ``steps`` - 1; NaN where none was recorded."""
        return [self.losses.get(step, float("nan")) for step in range(steps)]


def largest_relative_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest ``|a - b| / |b|`` of two equally long curves; infinite if one has a NaN.

    Raises:
        ValueError: the curves differ in length, or are empty.
    """
    if not losses or len(losses) != len(reference):
        raise ValueError(f"curves of {len(losses)} and {len(reference)} steps cannot be compared")
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("inf")
