"""Says when no step is committed for long, and what the ranks do meanwhile.

Workers say so too, but under a manager their words go into logs, and the terminal would be silent.
"""

from collections.abc import Mapping
from dataclasses import replace

from varuna.core.messages import Beat
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Running

_STILL_S, _UNUSUAL = 45.0, 3.0
_NAMED = 3


def note_standstill(transition: Transition, phase: Running) -> None:
    """Tell once of a step that takes much longer than the one before: who is at work, or who waits for whom."""
    fleet = transition.fleet
    still_s = (
        transition.now_s - fleet.recorded_s if fleet.recorded_s else 0.0
    )  # a manager that resumes knows of no step yet
    if not fleet.formed or phase.still_step == fleet.recorded_step or fleet.is_leaving or fleet.is_alone:
        return
    if still_s < max(_STILL_S, _UNUSUAL * fleet.step_every_s):
        return
    transition.update(phase=replace(phase, still_step=fleet.recorded_step))
    beats = _beats(fleet)
    at_work = [f"rank {rank} {beat.activity}" for rank, beat in beats.items() if beat.at_work]
    said = at_work or [f"rank {rank} {beat.activity}" for rank, beat in beats.items()]
    more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    others = f". The other {len(beats) - len(at_work)} wait" if at_work and len(at_work) < len(beats) else ""
    what = f": {'; '.join(said[:_NAMED])}{more}{others}" if said else ""
    transition.notice(f"no step for {still_s:.0f} s{what}")


def _beats(fleet: Fleet) -> Mapping[int, Beat]:
    """The newest beat of each rank in the present generation."""
    found = {}
    for rank, name in enumerate(fleet.record.grid):
        beat = fleet.workers[name].beat if fleet.is_joined(name) else None
        if beat is not None and beat.generation == fleet.generation:
            found[rank] = beat
    return found
