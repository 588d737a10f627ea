"""Trainings of a script, one after another: the next one begins when all ranks of the one before have left it.

Workers count the trainings that they have begun, and say in their Hello which one it is. Whoever is behind (it came
later, or had no part in the end of one) is told that the training is over, and goes on behind its loop. Whoever is
ahead waits for those that are not through.
"""

from varuna.core.messages import Finish, Hello, TrainingOver
from varuna.fleet.machine.exits import dismiss_rest, note_leaving
from varuna.fleet.machine.joins import is_unequal, note_hello, send_away
from varuna.fleet.machine.outcome import last_step, outcome, steps_made
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.phases import Finishing
from varuna.fleet.state.run_events import TrainingEnded
from varuna.fleet.state.worker import WorkerStatus, changed


def begin_next_training(transition: Transition) -> None:
    """Begin the next training with those that wait for it; the others come when they are through with their code."""
    fleet = transition.fleet
    assert fleet.job is not None
    waiting = {name: hello for name, hello in fleet.script.ahead.items() if name in fleet.workers}
    if not waiting:
        transition.update(script=changed(fleet.script, ahead={}))
        return
    dismiss_rest(transition)
    fleet = transition.fleet
    ended = TrainingEnded(training=fleet.training, job=fleet.job, steps=steps_made(fleet), last=last_step(fleet))
    transition.fleet = fleet.begin_training(ended, transition.now_s)
    transition.publish(ended)
    for name, hello in waiting.items():
        hear_hello(transition, name, hello)


def hear_hello(transition: Transition, name: str, hello: Hello) -> None:
    """Take a worker into the training that it begins; or let it pass that, or wait for it."""
    fleet = transition.fleet
    if hello.training > fleet.training:
        _note_ahead(transition, name, hello)
    elif hello.training < fleet.training:
        ended = fleet.script.trainings[hello.training]
        if not is_unequal(transition, name, hello, ended.job):
            transition.send(name, TrainingOver(training=ended.training, steps=ended.steps, last=ended.last))
    elif not isinstance(fleet.phase, Finishing):
        note_hello(transition, name, hello)
    elif fleet.workers[name].standing is not WorkerStatus.LEFT:
        assert fleet.job is not None
        if not is_unequal(transition, name, hello, fleet.job):
            transition.send(name, outcome(fleet, name))


def _note_ahead(transition: Transition, name: str, hello: Hello) -> None:
    """Note that a worker is through with the present training and begins the next one."""
    fleet, number = transition.fleet, hello.training
    is_ending = isinstance(fleet.phase, Finishing) or fleet.is_leaving
    if fleet.workers[name].standing is WorkerStatus.DISMISSED and not is_ending:
        transition.send(name, Finish(training=number))  # its machine was given back: it trains no more
    elif number > fleet.training + 1:
        send_away(
            transition,
            name,
            f"it begins training {number + 1} of its script, and the run is in training {fleet.training + 1}",
        )
    elif fleet.requests.finish is not None:
        text = f"{fleet.requests.finish}; training {number + 1} of the script does not begin"
        note_leaving(transition, name, fleet.training)  # it is through, whatever of its words was lost
        transition.send(name, Finish(failure=text, training=number))
        transition.update_worker(name, standing=WorkerStatus.DISMISSED)
    else:
        note_leaving(transition, name, fleet.training)
        transition.update(script=changed(transition.fleet.script, ahead={**fleet.script.ahead, name: hello}))
