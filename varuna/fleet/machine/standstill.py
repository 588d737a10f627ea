"""Standstill of a run that commits no step for long: since when, and what it waits for. The same words for all who ask.

Workers say so too, but under a manager their words go into logs, and the terminal would be silent.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from varuna.core.messages import Beat
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import Obstacle
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Ended, Finishing, Idle, Running, Stopping
from varuna.fleet.state.worker import WorkerStatus

_STILL_S, _UNUSUAL = 45.0, 3.0
_FIRST_S, _STEPS = 300.0, 10.0
"""So long the way to the first step may take; and so many times a step's usual time any other."""
_NAMED = 3


class Stillness(NamedTuple):
    """A run that has no step for long."""

    for_s: float
    why: str
    """for what it waits, in words"""


def stillness(fleet: Fleet, now_s: float) -> Stillness | None:
    """Return whether a run that is to train stands still, and why; ``now_s`` by the manager's clock."""
    if isinstance(fleet.phase, Ended | Finishing) or fleet.is_leaving:
        return None
    has_trained = fleet.recorded.step >= 0
    since_s = (has_trained and fleet.recorded.at_s) or fleet.experience.began_s
    bound_s = max(_STILL_S, _STEPS * fleet.recorded.every_s) if has_trained else _FIRST_S
    if has_trained and _is_blocked(fleet):
        bound_s = 0.0
    for_s = now_s - since_s
    return Stillness(for_s, _why(fleet, now_s)) if for_s >= bound_s else None


def _is_blocked(fleet: Fleet) -> bool:
    """Return whether no step can follow as things are."""
    match fleet.phase:
        case Idle(blocked=blocked):
            return blocked is not None
        case Stopping(waits=waits):
            return waits
        case _:
            return False


def _why(fleet: Fleet, now_s: float) -> str:
    if fleet.contacts.is_alone:
        return f"no machine has been heard for {now_s - fleet.contacts.heard_s:.0f} s"
    match fleet.phase:
        case Running():
            return doing(fleet) or "nothing has been heard of what its workers do"
        case Idle(blocked=blocked) if blocked is not None and blocked.by is not Obstacle.NO_WORKERS:
            why = blocked.text
        case Stopping(waits=True):
            why = "it waits for state that only machines out of sight hold"
        case Stopping():
            why = "its workers come to a stop, for another plan"
        case _:
            why = gathered(fleet)
    return f"{why}{because(fleet)}"


def gathered(fleet: Fleet) -> str:
    """Count, in words, the workers that have joined of those that the run was started for."""
    there, wanted = fleet.workers.count(WorkerStatus.JOINED), max(fleet.starts.wanted, fleet.config.workers)
    return f"waiting for {'machines' if fleet.config.elastic else 'workers'}: {there} of {wanted} workers have joined"


def because(fleet: Fleet) -> str:
    """Reason for which the last generation ended, in brackets behind what the run waits for; empty if all is well."""
    causes = [cause.text for cause in fleet.generations.causes]
    more = [f"and {len(causes) - _NAMED} more"] if len(causes) > _NAMED else []
    return f" ({'; '.join([*causes[:_NAMED], *more])})" if causes else ""


def doing(fleet: Fleet) -> str:
    """Return what ranks of the newest generation say that they do: who is at work, or who waits for whom."""
    beats = _beats(fleet)
    at_work = [f"rank {rank} {beat.activity}" for rank, beat in beats.items() if beat.at_work]
    said = at_work or [f"rank {rank} {beat.activity}" for rank, beat in beats.items()]
    more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    others = f". The other {len(beats) - len(at_work)} wait" if at_work and len(at_work) < len(beats) else ""
    return f"{'; '.join(said[:_NAMED])}{more}{others}" if said else ""


def note_standstill(transition: Transition, phase: Running) -> None:
    """Tell once of a step that takes much longer than the one before: who is at work, or who waits for whom."""
    fleet = transition.fleet
    still_s = (
        transition.now_s - fleet.recorded.at_s if fleet.recorded.at_s else 0.0
    )  # a manager that resumes knows of no step yet
    if not fleet.formed or phase.still_step == fleet.recorded.step or fleet.is_leaving or fleet.contacts.is_alone:
        return
    if still_s < max(_STILL_S, _UNUSUAL * fleet.recorded.every_s):
        return
    transition.update(phase=replace(phase, still_step=fleet.recorded.step))
    what = doing(fleet)
    transition.notice(f"no step for {still_s:.0f} s{f': {what}' if what else ''}")


def _beats(fleet: Fleet) -> Mapping[int, Beat]:
    """The newest beat of each rank in the present generation."""
    found = {}
    for rank, name in enumerate(fleet.record.grid):
        beat = fleet.workers[name].beat if fleet.is_joined(name) else None
        if beat is not None and beat.generation == fleet.generation:
            found[rank] = beat
    return found
