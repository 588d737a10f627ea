"""A run's events as sentences, each with its moment. Pure."""

from typing import Literal, NamedTuple

from varuna.core.plan import Plan
from varuna.core.units import counted, format_dollars, format_duration
from varuna.fleet.machine.budget import limit_words, limits_of
from varuna.fleet.state.run_events import (
    Asked,
    Budgeted,
    CheckpointCommitted,
    GenerationRecord,
    GenerationStarted,
    Morphed,
    Notice,
    Priced,
    RunEnded,
    RunEvent,
    TrainingEnded,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)

Kind = Literal[
    "begin",
    "joined",
    "left",
    "leaving",
    "lost",
    "morph",
    "notice",
    "warning",
    "checkpoint",
    "asked",
    "ended",
    "failed",
]
MOST_TEXT = 600


class Mark(NamedTuple):
    """A sentence, and where it belongs on the curve."""

    kind: Kind
    text: str
    time_s: float
    step: int | None
    """Newest step at that moment."""


def sentence_of(event: RunEvent, time_s: float, step: int | None) -> Mark | None:
    """Return an event as a sentence, if there is one to tell; texts of workers are cut off after some lines."""
    found = _sentence(event)
    if found is None:
        return None
    kind, text = found
    return Mark(kind, text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ...", round(time_s, 2), step)


def _sentence(event: RunEvent) -> tuple[Kind, str] | None:
    match event:
        case GenerationStarted(record=record) if record.generation == record.began:
            return "begin", _beginning(record)
        case Morphed(record=record, old_plan=old):
            return "morph", _morph(record, old)
        case WorkerJoined(worker=worker):
            return "joined", f"Worker {worker} joined."
        case WorkerLeft(worker=worker):
            return "left", f"Worker {worker} left."
        case Priced() | Budgeted():
            return "notice", _money(event)
        case WorkerLost(worker=worker, cause=cause):
            return "lost", cause if worker in cause else f"Lost worker {worker}: {cause}"
        case Notice(text=text, warning=warning, departs=departs):
            return "warning" if warning else "leaving" if departs else "notice", text
        case CheckpointCommitted(step=step):
            return "checkpoint", f"The checkpoint of step {step} is complete."
        case Asked(what=what, node=node, reason=reason):
            of = f" of node {node}" if node else ""
            return "asked", f"A {what}{of} was requested{f': {reason}' if reason else ''}."
        case TrainingEnded() | RunEnded():
            return _ending(event)
        case _:
            return None


def _money(event: Priced | Budgeted) -> str:
    if isinstance(event, Budgeted):
        limits = [limit_words(event, flag) for flag, value in limits_of(event).items() if value is not None]
        return f"The run may use up {' and '.join(limits)}, all its starts together."
    on_demand = event.on_demand_per_hour
    beside = "" if on_demand is None else f", and {format_dollars(on_demand)} on demand"
    return f"A worker costs {format_dollars(event.per_hour)} per hour{beside}."


def _beginning(record: GenerationRecord) -> str:
    plan = record.plan
    each = f"{counted(plan.micro_batches, 'micro-batch')} of {plan.micro_batch}"
    workers = counted(len(record.members), "worker")
    begins = f"goes on at step {record.first_step}" if record.first_step else "begins"
    number = f" {record.training + 1} of the script" if record.training else ""
    return f"Training{number} {begins} on {workers} with plan {plan.shape} (stages x replicas): {each}."


def _ending(event: TrainingEnded | RunEnded) -> tuple[Kind, str]:
    if isinstance(event, TrainingEnded):
        return "notice", f"Training {event.training + 1} of the script is over after {counted(event.steps, 'step')}."
    if event.exit_code:
        return "failed", f"The run ended with exit code {event.exit_code}: {event.text}"
    return "ended", f"The run ended well{f': {event.text}' if event.text else ''}."


def _morph(record: GenerationRecord, old: Plan) -> str:
    change = f"{old.shape} to {record.plan.shape}" if old.shape != record.plan.shape else f"still {old.shape}"
    after = "" if record.recovery_seconds is None else f" after {format_duration(record.recovery_seconds)}"
    redone = counted(record.steps_redone, "step")
    if record.kept_micro_batches:
        kept = f" but for {record.kept_micro_batches} of {record.plan.micro_batches} micro-batches"
    else:
        kept = ""
    moved = f", {counted(record.moved_sections, 'section')} moved" if record.moved_sections else ""
    back = f", from a {'memory ' * record.from_memory}checkpoint" if record.rollback else ""
    return f"Morph: {record.cause}. Plan {change}{after}{back}; {redone} redone{kept}{moved}."
