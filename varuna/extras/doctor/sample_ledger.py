"""The sample ledger: from the event log alone, which samples the committed steps of a run used, and how often.

A step is committed by one vote, whose slots have one writer each: a slot per micro-batch carries its weight. So a log
in which every step of the surviving timeline is recorded once, by the generation that ran it, with all micro-batches of
that generation's plan, proves that each sample of each committed step was used exactly once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pydantic import Field

from varuna.core.plan import Plan
from varuna.core.value import Value
from varuna.fleet.state.run_events import (
    GenerationRecord,
    GenerationStarted,
    RunEnded,
    RunEvent,
    StepRecorded,
    TrainingEnded,
)


class SampleLedger(Value):
    """The log's account of a run's samples; where its script has several trainings, of the newest."""

    first_step: int = Field(description="where the log begins: 0, or after a checkpoint")
    steps: int = Field(description="committed, in the timeline that survived")
    samples: int = Field(description="positions of the sample order that they used, each once if there are no faults")
    undone: int = Field(description="steps that a rollback took back")
    weights: tuple[float, ...] = Field(description="weight of each step: equal in an undisturbed run")
    faults: tuple[str, ...] = Field(description="why the log proves nothing; empty if all is well")


def audit(events: Iterable[RunEvent], *, is_cut: bool = False) -> SampleLedger:
    """Go through the log in order; of several runs in one folder, the newest counts.

    Args:
        events: the log.
        is_cut: its first steps were left out: it begins with the first one that is there.
    """
    book, is_over = _Book(), False
    for event in _from_first_step(events) if is_cut else events:
        match event:
            case RunEnded():
                is_over = True
            case GenerationStarted(record=record):
                if is_over:
                    book, is_over = _Book(), False
                book.begin(record)
            case StepRecorded():
                book.commit(event)
            case TrainingEnded():
                book = _Book(book.faults)
            case _:
                pass
    return book.close()


def _from_first_step(events: Iterable[RunEvent]) -> Iterator[RunEvent]:
    """Return the log from its first step on, as if the generation of that step had begun with it."""
    running: GenerationRecord | None = None
    has_begun = False
    for event in events:
        if has_begun:
            yield event
        elif isinstance(event, GenerationStarted):
            running = event.record
        elif isinstance(event, StepRecorded):
            has_begun = True
            if running is not None:
                yield GenerationStarted(record=running.model_copy(update={"first_step": event.step}))
            yield event


class _Book:
    """The timeline so far."""

    def __init__(self, faults: Sequence[str] = ()) -> None:
        self._generation: GenerationRecord | None = None
        self._first_step = 0
        self._steps: list[StepRecorded] = []
        self._undone = 0
        self.faults: list[str] = [*faults]

    @property
    def _next_step(self) -> int:
        return self._first_step + len(self._steps)

    def begin(self, record: GenerationRecord) -> None:
        """Note a generation, which starts after the newest committed step, or falls back and takes steps with it."""
        before, self._generation = self._generation, record
        name = f"generation {record.generation}"
        if before is None:
            self._first_step = record.first_step
        elif record.generation <= before.generation:
            self._fault(f"{name} follows generation {before.generation}: numbers are used once")
        if record.rollback and before is not None:
            kept = max(0, record.first_step - self._first_step)
            self._undone += len(self._steps[kept:])
            del self._steps[kept:]
            self._first_step = min(self._first_step, record.first_step)
        if record.first_step != self._next_step:
            self._fault(f"{name} begins with step {record.first_step}, but {self._next_step} is the next one")
        for text in _share_faults(record.plan):
            self._fault(f"{name}: {text}")

    def commit(self, event: StepRecorded) -> None:
        """Note a step that was recorded."""
        step = f"step {event.step}"
        if self._generation is None or event.generation > self._generation.generation:
            self._fault(f"{step} is of generation {event.generation}, which had not begun")
        if event.step != self._next_step:
            self._fault(f"{step} was recorded where {self._next_step} was the next one")
        counted = event.counted
        if counted is not None and counted > event.plan.micro_batches:
            self._fault(f"{step} counts {counted} micro-batches, but its plan has {event.plan.micro_batches}")
        self._steps.append(event)

    def close(self) -> SampleLedger:
        """Return the ledger of the timeline."""
        return SampleLedger(
            first_step=self._first_step,
            steps=len(self._steps),
            samples=sum(step.plan.global_batch for step in self._steps),
            undone=self._undone,
            weights=tuple(step.weight for step in self._steps),
            faults=tuple(self.faults),
        )

    def _fault(self, text: str) -> None:
        self.faults.append(text)


def _share_faults(plan: Plan) -> list[str]:
    """Find gaps and overlaps between replicas' samples of a global batch, or between stages' sections."""
    shares = Counter(
        sample
        for replica in range(plan.replicas)
        for micro_batch in plan.micro_batches_of(replica)
        for sample in plan.samples_of(micro_batch)
    )
    faults = []
    if shares != Counter(range(plan.global_batch)):
        faults.append(f"its replicas do not share {plan.global_batch} samples exactly once")
    for pipeline in plan.pipelines:
        if [section for stage in range(pipeline.stages) for section in pipeline.sections_of(stage)] != list(
            range(plan.sections)
        ):
            faults.append(f"its stages do not share {plan.sections} sections exactly once")
    return faults
