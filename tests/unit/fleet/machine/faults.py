"""State machines that are wrong in one thing each: the real one, of which one input or output is another."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.unit.fleet.support import Machine, with_history
from varuna.core.messages import Apply, Finish, StopReport
from varuna.fleet.machine.advance import advance
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import Event, MessageReceived
from varuna.fleet.state.outputs import Instruction, Publish, Send
from varuna.fleet.state.phases import Stopping
from varuna.fleet.state.run_events import VerdictReached

Turn = tuple[Fleet, list[Instruction]]


def hearing(change: Callable[[Fleet, StopReport], dict[str, Any]]) -> Machine:
    """Return a machine that hears something else than a worker that has stopped says it holds."""

    def machine(fleet: Fleet, event: Event, now_s: float) -> Turn:
        if isinstance(event, MessageReceived) and isinstance(event.message, StopReport):
            changed = event.message.model_copy(update=change(fleet, event.message))
            event = replace(event, message=changed)
        return advance(fleet, event, now_s)

    return machine


def takes_any_answer_for_the_result(fleet: Fleet, event: Event, now_s: float) -> Turn:
    """An answer to Hold that crossed an Apply counts as the answer to that."""
    if (
        isinstance(event, MessageReceived)
        and isinstance(event.message, StopReport)
        and isinstance(fleet.phase, Stopping)
    ):
        fleet = replace(fleet, phase=replace(fleet.phase, applying=fleet.phase.applying - {event.worker}))
    return advance(fleet, event, now_s)


def forgets_recorded_votes(fleet: Fleet, event: Event, now_s: float) -> Turn:
    """Nobody who lacks the newest step can be told its vote any more."""
    after, instructions = advance(fleet, event, now_s)
    is_news = after.recorded.step > fleet.recorded.step
    return replace(after, recorded=replace(after.recorded, votes={})) if is_news else after, instructions


def tells_before_it_writes(fleet: Fleet, event: Event, now_s: float) -> Turn:
    """The verdict is on disk last of all."""
    after, instructions = advance(fleet, event, now_s)
    return after, sorted(instructions, key=_is_verdict)


def begins_no_timeline(fleet: Fleet, event: Event, now_s: float) -> Turn:
    """A rollback abandons nothing."""
    after, instructions = advance(fleet, event, now_s)
    return replace(after, recorded=replace(after.recorded, lineage=0)), instructions


def ends_for_all(fleet: Fleet, event: Event, now_s: float) -> Turn:
    """Whoever has not applied the last step is sent home like the others."""
    after, instructions = advance(fleet, event, now_s)
    return after, [_sent_home(each) if after.is_leaving else each for each in instructions]


def forgets_that_it_rolled_back(fleet: Fleet, event: Event, now_s: float) -> Turn:
    """To whoever judges what workers hold, the newest generation began like any other."""
    if fleet.history:
        fleet = with_history(fleet, (*fleet.history[:-1], fleet.record.model_copy(update={"rollback": False})))
    return advance(fleet, event, now_s)


is_heard_without_votes = hearing(lambda _, held: {"votes": ()})
"""A step that only those know who applied it is run again."""

counts_every_vote = hearing(
    lambda fleet, held: {
        "votes": tuple(vote.model_copy(update={"generation": fleet.generation}) for vote in held.votes)
    }
)
"""Votes of a timeline that a rollback abandoned, too."""

counts_lent_sections = hearing(lambda _, held: {"sections": tuple(sorted({*held.sections, *held.lent}))})
"""Parameters without optimizer state are taken for a section."""

forgets_copies = hearing(lambda _, held: {"copies": ()})
"""Nobody knows of copies of other workers' state."""

counts_every_copy = hearing(lambda fleet, held: {"copies": tuple(range(fleet.record.plan.sections))})
"""A copy that has not come, or is of an older step, is taken for one."""


def _is_verdict(instruction: Instruction) -> bool:
    return isinstance(instruction, Publish) and isinstance(instruction.event, VerdictReached)


def _sent_home(instruction: Instruction) -> Instruction:
    if isinstance(instruction, Send) and isinstance(instruction.message, Apply):
        return replace(instruction, message=Finish())
    return instruction
