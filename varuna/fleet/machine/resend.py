"""Repeats what a worker may not have heard, when its agent or the worker connects anew."""

from varuna.core.messages import Apply, Finish, Hold, RaiseFlag
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Running, Stopping
from varuna.fleet.state.worker import Standing


def say_again(transition: Transition, name: str) -> None:
    """Whatever was on its way when the connection, or the manager, was lost; all of it may be heard twice.

    A part in a generation is not: whoever has missed it says so (see ``manager.reconcile``).
    """
    fleet, phase = transition.fleet, transition.fleet.phase
    worker = fleet.workers[name]
    if worker.standing is Standing.DISMISSED:
        transition.send(name, Finish())
    elif isinstance(phase, Running) and name == fleet.members[0]:
        for flag in sorted(phase.flags):
            transition.send(name, RaiseFlag(generation=fleet.generation, flag=flag))
    elif isinstance(phase, Stopping) and fleet.is_member(name) and worker.is_joined and worker.holding is None:
        if name in phase.applying:
            transition.send(name, Apply(generation=fleet.generation, vote=fleet.votes[max(fleet.votes)]))
        elif phase.hold_at_s is None:
            transition.send(name, Hold(generation=fleet.generation))
