"""Devices and machines that fail: a lost worker, and not the end of the run, as long as all may go well elsewhere.

A GPU that broke, or a machine whose disk or mount did, gets no worker for a while. If what the code does broke it, the
step breaks the next one, too: the same error on two of them, in the same step and one after the other, ends the run. In
one generation it says less: what the GPUs of a machine share may have failed.

An error that says nothing of a machine may be the code's or a machine's (another driver, a package, bad memory). It
costs the worker, too, where others have machines of their own; if the step then fails once more, it was the code.

A device that was too small has a worker again, or still, with a plan that fills less of it.
"""

from varuna.core.devices import DeviceFault, rest_s
from varuna.core.units import format_bytes, format_duration
from varuna.fleet.machine.transition import Transition
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.machines import BrokenDevice, ShortMemory
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.worker import Worker, changed

_MOST_TIMES = 2
"""Plans that did not fit so often are wrong by more than a plan can make good."""


def note_fault(transition: Transition, name: str, fault: DeviceFault) -> None:
    """Note that a worker's device or machine has failed, which ends the worker."""
    if fault.is_memory:
        note_full(transition, name, fault)
        if not isinstance(transition.fleet.phase, Ended):
            transition.lose_worker(name, f"ran out of memory on its GPU: {fault.error}", kill=True)
    else:
        _note_broken(transition, name, fault)


def note_error(
    transition: Transition, name: str, text: str, *, exit_code: int, detail: str, accused: int | None = None
) -> None:
    """Note that a worker ended by an error of its own code, which another machine may not meet.

    The run ends before its first step, where all workers are on one machine, and where the same step has failed before:
    on another machine, or on this one, if no generation since then has done without it.

    Args:
        transition: of the event.
        name: of the worker.
        text: which error, of which worker: ``worker w3 (rank 1, ...) failed: ...``.
        exit_code: of the run, if it ends.
        detail: what follows the text, such as a traceback.
        accused: rank that has read another sample than this worker. Two machines are believed that say so of a third.
    """
    fleet, worker = transition.fleet, transition.fleet.workers[name]
    device, step = f"machine {worker.node}", fleet.recorded.step + 1
    again = [
        (other, seen)
        for other, seen in fleet.machines.broken.items()
        if seen.may_be_code and seen.step == step and (other != device or _is_needed(fleet, worker.node, seen))
    ]
    other = next((fleet.workers.get(each) for rank, each in enumerate(fleet.members) if rank == accused), None)
    odd = "" if other is None or other.node == worker.node else other.node
    is_odd = bool(odd) and any(seen.accused == odd and known != device for known, seen in again)
    if is_odd:
        for each in filter(fleet.is_joined, fleet.workers.on(odd)):
            transition.lose_worker(each, "has read other samples than two other machines", kill=True, rests=True)
    elif again or not fleet.config.elastic or is_only_machine(fleet, worker.node) or fleet.recorded.step < 0:
        before = f" Step {step} had failed on {again[0][0]} before: {again[0][1].error}" if again else ""
        transition.forget_worker(name)
        transition.end_run(exit_code, f"{text}{before}{detail}", worker=name)
        return
    transition.notice(
        f"{text.rstrip('.')}. Its machine may be to blame, so the run goes on without this worker, and ends if step "
        f"{step} fails again{detail}",
        warning=True,
    )
    _rest(transition, name, device, device, text, may_be_code=True, accused=odd)
    transition.lose_worker(name, text.removeprefix(f"worker {name} "), kill=True)


def is_only_machine(fleet: Fleet, node: str) -> bool:
    """Return whether there is no worker on any other machine."""
    return all(each.node == node for each in fleet.workers.values())


def _is_needed(fleet: Fleet, node: str, seen: BrokenDevice) -> bool:
    """Return whether every generation after a failure had a worker of its machine, so that it may fail for ever."""
    later, there = [each for each in fleet.history if each.generation > seen.generation], fleet.workers.on(node)
    return bool(later) and not any(each.ranks.keys().isdisjoint(there) for each in later)


def _note_broken(transition: Transition, name: str, fault: DeviceFault) -> None:
    fleet, device = transition.fleet, _device_of(transition.fleet.workers[name], fault)
    title = device if fault.of_machine else _title(fleet.workers[name], device)
    what = "machine" if fault.of_machine else "GPU"
    step, generation = fleet.recorded.step + 1, fleet.generation
    for other, seen in fleet.machines.broken.items():
        is_earlier = seen.generation < generation or generation < 0
        if other != device and is_earlier and (seen.error, seen.step) == (fault.error, step):
            transition.end_run(
                1,
                f"step {step} broke two {what}s in the same way, one after the other, so what the job does is more "
                f"likely to be wrong than both of them: {fault.error}. First {other} of {' and '.join(seen.workers)}, "
                f"in generation {seen.generation}; then {title} of {name}, in generation {generation}. "
                + (_LOOK_AT_MACHINES if fault.of_machine else _LOOK_AT_GPUS),
                worker=name,
            )
            return
    _rest(transition, name, device, title, fault.error)
    transition.lose_worker(name, f"lost its {what}: {fault.error}", kill=True)


def _rest(
    transition: Transition,
    name: str,
    device: str,
    title: str,
    error: str,
    *,
    may_be_code: bool = False,
    accused: str = "",
) -> None:
    """Let a device, or a machine, have no worker for a while."""
    fleet = transition.fleet
    before = fleet.machines.broken.get(device)
    is_same = before is not None and transition.now_s < before.until_s  # other workers had the same GPU
    faults = (0 if before is None else before.faults) + (not is_same)
    broken = BrokenDevice(
        error=error,
        step=fleet.recorded.step + 1,
        generation=fleet.generation,
        workers=(*(before.workers if before is not None and is_same else ()), name),
        faults=faults,
        until_s=transition.now_s + rest_s(faults),
        may_be_code=may_be_code,
        accused=accused,
    )
    transition.update(machines=changed(fleet.machines, broken={**fleet.machines.broken, device: broken}))
    transition.notice(f"{title} gets no worker for {format_duration(rest_s(faults))}, since it failed", warning=True)


_LOOK_AT_GPUS = (
    "Run the script with CUDA_LAUNCH_BLOCKING=1, which shows the operation. If it is sound, look for Xid in the "
    "kernel's log (dmesg)."
)
_LOOK_AT_MACHINES = "Read what that step reads by hand, on each of them; if they share a disk or a mount, look at that."


def note_full(transition: Transition, name: str, fault: DeviceFault) -> None:
    """Note that a member's device has too little memory: plans fill less of its class, or the run ends."""
    fleet, worker = transition.fleet, transition.fleet.workers[name]
    before, of = fleet.machines.short.get(worker.device_class), worker.device_class or "its class"
    figures = _figures(fleet, worker, fault)
    if worker.is_joined and fleet.history and (before is None or before.generation < fleet.generation):
        if before is not None and before.times == _MOST_TIMES:
            transition.end_run(
                1,
                f"worker {name} ran out of memory in step {fleet.recorded.step + 1}{figures}: {fault.error}. Plans for "
                f"{of} fill {1 - before.part:.0%} less than its devices seem to have. "
                "Lower micro_batch=, pass --memory-per-worker, or add workers; and see what else uses these GPUs "
                "(nvidia-smi).",
                worker=name,
            )
            return
        short = ShortMemory(times=1 if before is None else before.times + 1, generation=fleet.generation)
        transition.update(
            machines=changed(fleet.machines, short={**fleet.machines.short, worker.device_class: short}),
            generations=fleet.generations.replanning(),
        )
        transition.ask_anew()
        transition.notice(
            f"out of memory on worker {name}{figures}: plans for {of} fill 10 % less from now on", warning=True
        )


def _figures(fleet: Fleet, worker: Worker, fault: DeviceFault) -> str:
    """Say what a worker's stage was promised, what its device has, and what other processes had of that."""
    rank = fleet.rank_of(worker.name)
    if rank is None or worker.device is None or not fleet.record.has_seat(worker.name):
        return ""
    plan, whole = fleet.record.plan, format_bytes(worker.device.memory_bytes)
    replica, stage = plan.place_of(rank)
    promised = plan.pipeline_of(replica).memory_bytes
    needs = f"which was to need {format_bytes(promised[stage])}, " if promised else ""
    others = f", of which other processes hold {format_bytes(fault.others_bytes)}" if fault.others_bytes else ""
    return f" in stage {stage}, {needs}on a GPU of {whole}{others}"


def _device_of(worker: Worker, fault: DeviceFault) -> str:
    """The name of a device, or of its only worker that is known; of a machine, if that is what failed."""
    if fault.of_machine:
        return f"machine {worker.node}"
    return fault.device or (worker.device.name if worker.device is not None else worker.name)


def _title(worker: Worker, device: str) -> str:
    """``GPU 0102… (Tesla T4)``."""
    return f"GPU {device}{f' ({worker.device_class})' if worker.device_class else ''}"
