"""Newcomers: asked for, and let in if they do the same job as everybody else. Who connects anew is told again."""

from varuna.core.devices import DeviceFacts
from varuna.core.job_difference import job_difference
from varuna.core.messages import Apply, Finish, Hello, Hold, RaiseFlag
from varuna.core.model import JobFacts
from varuna.fleet.machine.outcome import outcome
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.causes import Objection
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.outputs import Spawn
from varuna.fleet.state.phases import Finishing, Running, Stopping
from varuna.fleet.state.run_events import WorkerJoined
from varuna.fleet.state.worker import Worker, WorkerInventory, WorkerStatus, changed


def note_spawned(transition: Transition, name: str, node: str) -> None:
    """Note that a process was started."""
    fleet = transition.fleet
    replacement = not fleet.config.elastic and fleet.starts.spawned >= fleet.config.workers
    worker = Worker(name=name, node=node, seen_s=fleet.listened_s, replacement=replacement)
    transition.update(
        workers=fleet.workers.with_worker(worker),
        starts=changed(fleet.starts, spawned=fleet.starts.spawned + 1, spawning=max(0, fleet.starts.spawning - 1)),
    )
    transition.expire_by(transition.now_s + fleet.config.start_timeout_s)


def spawn_missing(transition: Transition) -> None:
    """Ask for the workers that should exist, unless the last ones died at once."""
    missing, starts = transition.fleet.missing, transition.fleet.starts
    if missing and transition.now_s >= starts.again_s:
        transition.instructions.append(Spawn(missing, transition.fleet.resting))
        transition.update(starts=changed(starts, spawning=starts.spawning + missing))


def note_hello(transition: Transition, name: str, hello: Hello) -> None:
    """Note that a worker is warm: all workers of a run must agree on their job."""
    fleet = transition.fleet
    if fleet.workers[name].standing is not WorkerStatus.STARTING:
        # a manager that has started again knows of no device
        transition.update_worker(name, device=_device_of(fleet, name, hello), device_class=hello.device_class)
        say_again(transition, name)
        return
    if fleet.job is None:
        transition.update(script=changed(fleet.script, job=hello.job, version=hello.version))
    elif is_unequal(transition, name, hello, fleet.job):
        return
    transition.update_worker(
        name,
        standing=WorkerStatus.JOINED,
        pid=hello.pid,
        joined_s=transition.now_s,
        holding=WorkerInventory(),
        device=_device_of(fleet, name, hello),
        device_class=hello.device_class,
    )
    if not fleet.config.elastic:
        transition.expire_by(transition.now_s + fleet.config.lease_s)
    if fleet.history and hello.device is not None and _has_less_memory(transition.fleet, fleet):
        transition.ask_anew()
        transition.update(generations=fleet.generations.replanning())  # what ran in more memory may not fit any more
    if fleet.history:
        transition.note_change()
    transition.publish(WorkerJoined(worker=name, pid=hello.pid))


def _device_of(fleet: Fleet, name: str, hello: Hello) -> DeviceFacts | None:
    """A worker's device, on which others of this run may be: their memory is not that of other programs."""
    if (device := hello.device) is None:
        return None
    others_bytes = device.others_bytes
    for near in (fleet.workers[each] for each in fleet.workers.on(fleet.workers[name].node)):
        if near.is_joined and near.device is not None and near.device.name == device.name:
            others_bytes = min(others_bytes, near.device.others_bytes)
    return device.model_copy(update={"others_bytes": others_bytes})


def _has_less_memory(fleet: Fleet, before: Fleet) -> bool:
    """Return whether workers of some class can count on less memory than before."""
    known = {each.name: each.memory_bytes or 0 for each in before.groups_of(before.joined)}
    return any((each.memory_bytes or 0) < known.get(each.name, 0) for each in fleet.groups_of(fleet.joined))


def is_unequal(transition: Transition, name: str, hello: Hello, job: JobFacts) -> bool:
    """Return whether a worker's job is another one than the run's; then it is sent away."""
    difference = _difference(hello, job, transition.fleet.script.version)
    if difference is not None:
        send_away(transition, name, difference.text)
    return difference is not None


def send_away(transition: Transition, name: str, why: str) -> None:
    """Refuse a worker; another one would have the same fault, so it is not replaced."""
    reason = f"worker {name} was refused: {why}. Start all workers with the same script and arguments."
    transition.send(name, Finish(failure=reason))
    transition.do_without(name, reason)


def _difference(hello: Hello, job: JobFacts, version: str) -> Objection | None:
    """Name the first field in which a worker differs from the run, if there is one."""
    if hello.version != version:
        return Objection(f"its version is {hello.version!r}, but the run's is {version!r}")
    found = job_difference(hello.job, job)
    return None if found is None else Objection(found)


def say_again(transition: Transition, name: str) -> None:
    """Whatever was on its way when the connection, or the manager, was lost; all of it may be heard twice.

    A part in a generation is not: whoever has missed it says so (see ``manager.reconcile``).
    """
    fleet, phase = transition.fleet, transition.fleet.phase
    worker = fleet.workers[name]
    if worker.standing is WorkerStatus.DISMISSED:
        is_over = isinstance(phase, Finishing) or fleet.is_leaving
        transition.send(name, outcome(fleet, name) if is_over else Finish())
    elif isinstance(phase, Running) and name == fleet.members[0]:
        for flag in sorted(phase.flags):
            transition.send(name, RaiseFlag(generation=fleet.generation, flag=flag))
    elif isinstance(phase, Stopping) and fleet.is_member(name) and worker.is_joined and worker.holding is None:
        if name in phase.applying:
            transition.send(
                name, Apply(generation=fleet.generation, vote=fleet.recorded.votes[max(fleet.recorded.votes)])
            )
        elif phase.hold_at_s is None:
            transition.send(name, Hold(generation=fleet.generation))
