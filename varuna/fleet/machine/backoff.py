"""Generations that break before their first step although nobody dies: what to do instead of ending the run.

Cables between machines may be out, and come back. So the same workers try again, after pauses that grow, and at once
when somebody has joined. Workers that never trained are dropped first: one of them may be unable to. The run
ends only after a long time without a step, ``FleetConfig.futile_s``, in which generation after generation broke.
"""

from dataclasses import replace

from varuna.core.units import format_duration
from varuna.fleet.machine.standstill import because
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import Blocked, Obstacle
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.phases import Idle
from varuna.fleet.state.worker import changed

MANY = 3
"""This many in a row are not a coincidence."""
_LONGEST_PAUSE_S = 30.0


def note_broken(transition: Transition) -> None:
    """Note that the newest generation is over, and whether it broke before a step."""
    fleet = transition.fleet
    if fleet.formed or any(cause.took_somebody for cause in fleet.generations.causes):
        return
    generations = fleet.generations
    since_s = fleet.listened_s if generations.failing_since_s is None else generations.failing_since_s
    transition.update(generations=changed(generations, failed=generations.failed + 1, failing_since_s=since_s))


def waits(transition: Transition, phase: Idle, live: tuple[str, ...]) -> bool:
    """Whether the next generation has to wait; drops newcomers, or ends the run, if it is time for that."""
    fleet, failed = transition.fleet, transition.fleet.generations.failed
    if failed >= MANY and _drop_newcomers(transition, live):
        return True
    if failed >= MANY and _left_s(fleet) <= 0:
        transition.end_run(
            1,
            f"no step in {format_duration(fleet.config.futile_s)}: {failed} generations in a row broke before their "
            f"first step, though no worker died. The last reason: {' and '.join(map(str, fleet.generations.causes))}. "
            "Look at the workers' logs, and at the network between them.",
        )
        return True
    pause_s = _pause_s(failed)
    is_new = any(fleet.workers[name].joined_s > phase.since_s for name in live)
    if is_new or transition.now_s >= phase.since_s + pause_s:
        return False
    if phase.blocked is None or phase.blocked.by is not Obstacle.BREAKING:
        number, left = _nth(failed), format_duration(max(0.0, _left_s(fleet)))
        text = f"generation {fleet.generation} broke before its first step, the {number} in a row, though nobody died"
        transition.update(phase=replace(phase, blocked=Blocked(Obstacle.BREAKING, text)))
        transition.notice(
            f"{text}{because(fleet)}. The same workers try again in {pause_s:.0f} s, or as soon as another joins; "
            f"without a step the run ends in {left}",
            warning=True,
        )
    return True


def _left_s(fleet: Fleet) -> float:
    """Seconds that are left until a step must be done."""
    assert fleet.generations.failing_since_s is not None
    return fleet.generations.failing_since_s + fleet.config.futile_s - fleet.listened_s


def _pause_s(failed: int) -> float:
    """Seconds to wait: none after the first one, then 1, 2, 4, ..."""
    return 0.0 if failed < 2 else min(_LONGEST_PAUSE_S, 2.0 ** (failed - 2))


def _nth(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _drop_newcomers(transition: Transition, live: tuple[str, ...]) -> bool:
    """Drop workers that never trained, if there are others; this does not extend the time until a step must be done."""
    fleet = transition.fleet
    newcomers = [name for name in live if _has_nothing(fleet, name) and fleet.record.has_seat(name)]
    if not newcomers or len(newcomers) == len(live):
        return False
    since_s = fleet.generations.failing_since_s
    for name in newcomers:
        transition.lose_worker(name, "could not copy its state", kill=True)
    transition.update(generations=changed(transition.fleet.generations, failed=0, failing_since_s=since_s))
    return True


def _has_nothing(fleet: Fleet, name: str) -> bool:
    holding = fleet.workers[name].holding
    return holding is None or holding.next_step is None
