"""Accuracy of a run's predictions, from the event log alone: what each plan was to take, and what it took. Pure.

A generation's times are told when it has run twice as many steps as before, with the step time that was predicted by
what was known until then. What the steps since took tells how good that was.
"""

from collections.abc import Iterable, Sequence

from pydantic import Field

from varuna.core.times import RankTimes
from varuna.core.value import Value
from varuna.fleet.state.run_events import GenerationStarted, GenerationTimed, RunEnded, RunEvent


class CheckedPrediction(Value):
    """The newest prediction of a generation's step that was followed by steps, and what those took."""

    generation: int
    shape: str = Field(description="of its plan")
    first: int = Field(description="steps that the generation had run before")
    steps: int = Field(ge=1, description="that were compared")
    predicted_s: float = Field(gt=0)
    measured_s: float = Field(description="mean of a step")
    is_nominal: bool = Field(description="nothing had been measured: predicted from operation counts")

    @property
    def excess(self) -> float:
        """Share of the predicted time by which steps took longer; negative: they took less."""
        return self.measured_s / self.predicted_s - 1

    @property
    def deviation(self) -> str:
        """``2.1% less than predicted``."""
        return f"{abs(self.excess):.1%} {'more' if self.excess > 0 else 'less'} than predicted"


class PredictionBook:
    """Compares what was predicted with what followed, event by event; of several runs in a log, the newest counts."""

    def __init__(self) -> None:
        self._found = dict[int, CheckedPrediction]()  # by generation, as all below
        self._shapes = dict[int, str]()
        self._newest = dict[int, GenerationTimed]()
        self._is_over = False

    def add_event(self, event: RunEvent) -> None:
        """Note an event."""
        match event:
            case RunEnded():
                self._is_over = True
            case GenerationStarted(record=record):
                if self._is_over:
                    self._found, self._shapes, self._newest, self._is_over = {}, {}, {}, False
                self._shapes[record.generation] = record.plan.shape
            case GenerationTimed(generation=generation) if event.stages and generation in self._shapes:
                checked = _checked(event, self._newest.get(generation), self._shapes[generation])
                self._newest[generation] = event
                if checked is not None:
                    self._found[generation] = checked
            case _:
                pass

    @property
    def checked(self) -> tuple[CheckedPrediction, ...]:
        """One for each generation that ran for long enough and rested on measured times, the oldest first."""
        return tuple(each for _, each in sorted(self._found.items()) if not each.is_nominal)


def checked_predictions(events: Iterable[RunEvent]) -> tuple[CheckedPrediction, ...]:
    """Check the predictions of a whole log."""
    book = PredictionBook()
    for event in events:
        book.add_event(event)
    return book.checked


def _checked(now: GenerationTimed, before: GenerationTimed | None, shape: str) -> CheckedPrediction | None:
    """Compare the steps since ``before`` with what was predicted then; None: no more have been told."""
    first = before.stages if before is not None and len(before.stages) == len(now.stages) else ()
    steps = min(each.steps for each in now.stages) - min((each.steps for each in first), default=0)
    measured_s = _since(now.stages, first)
    if steps < 1 or now.predicted_s <= 0:
        return None
    return CheckedPrediction(
        generation=now.generation,
        shape=shape,
        first=min((each.steps for each in first), default=0),
        steps=steps,
        predicted_s=now.predicted_s,
        measured_s=measured_s,
        is_nominal=now.is_nominal,
    )


def _since(now: Sequence[RankTimes], before: Sequence[RankTimes]) -> float:
    """Seconds of a step of the slowest stage, without the steps that had been told before."""
    if not before:
        return max(each.step_s for each in now)
    return max(
        # both are means since the generation began: seconds in all, less those that were told before
        (late.steps * late.step_s - early.steps * early.step_s) / max(1, late.steps - early.steps)
        for late, early in zip(now, before, strict=True)
    )
