"""From the facts of a run to findings about what is wrong with it. Pure: no clock, no disk, no network."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from varuna.core.units import counted, format_bytes, format_duration
from varuna.extras.doctor.judging.finding import Finding, Severity
from varuna.extras.doctor.judging.judge_machine import is_full
from varuna.extras.doctor.sample_ledger import SampleLedger
from varuna.fleet.state.run_events import RunEnded
from varuna.observe.predictions import CheckedPrediction
from varuna.planner.line import Line

FEW_BYTES = 1 << 30
FEW_SHARE = 0.02
"""Share of a disk; with less free than this, or than the bytes below, it counts as nearly full."""
TOLERANCE = 0.05
"""A step that was predicted so much wrong is worth a look."""
_PREDICTIONS = 3
"""Number of generations that are looked at, the newest ones."""
CLOCK_SKEW_S = 5.0
"""Beyond this difference, expiry dates and logs of two machines cannot be compared."""


@dataclass(frozen=True)
class WorkerSeen:
    """A worker as the manager sees it."""

    name: str
    node: str
    state: str
    silent_s: float | None
    """since its last sign of life; None if it has given none yet"""


@dataclass(frozen=True)
class CheckpointSeen:
    """The newest checkpoint of the run's directory."""

    directory: str
    step: int | None
    """None: there is none yet"""
    problem: str = ""
    """reason why it cannot be used; empty if it can"""
    read_bytes: int | None = None
    """that were read and compared with their checksums; None if only the listing was looked at"""


@dataclass(frozen=True)
class Disk:
    """A file system that the run writes to."""

    use: str
    path: str
    free_bytes: int
    size_bytes: int
    machine: str = ""
    """empty: this one"""


@dataclass(frozen=True)
class Listener:
    """A socket that accepts connections."""

    process: str
    address: str
    port: int
    is_manager_port: bool = False
    """the manager's own port, which is protected"""
    machine: str = ""
    """empty: this one"""


@dataclass(frozen=True)
class ClockReading:
    """Another machine's clock."""

    machine: str
    ahead_s: float


@dataclass(frozen=True)
class Facts:
    """Everything that was read of a run."""

    state: str
    """in the manager's words; empty if it did not answer"""
    unreachable: str = ""
    """reason why it did not"""
    ended: RunEnded | None = None
    """the end of the run, if it has ended"""
    ledger: SampleLedger | None = None
    unaudited: int = 0
    """steps before those of the ledger"""
    unreadable: str = ""
    """reason why the journal could not be read"""
    lease_s: float = 6.0
    workers: Sequence[WorkerSeen] = ()
    single_holders: int = 0
    """sections of which one worker alone has anything, without a copy in another one's memory"""
    checkpoint: CheckpointSeen | None = None
    """None: the run keeps no checkpoints"""
    steps_since_checkpoint: int | None = None
    still_s: float = 0.0
    waits_for: str = ""
    """for what a run waits that stands still"""
    line: Line | None = None
    """that the plan needs, by what the run has measured; None: not known, or nothing leaves a machine"""
    predictions: Sequence[CheckedPrediction] = ()
    """by generation, the oldest first"""
    disks: Sequence[Disk] = ()
    listeners: Sequence[Listener] | None = field(default=())
    """None: this system does not tell"""
    untold: Sequence[str] = ()
    """machines that have not told of their ports"""
    clocks: Sequence[ClockReading] = ()


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings of all checks, in the order in which a person would want to read them."""
    return (
        *_manager(facts),
        *_ledger(facts),
        *_workers(facts),
        *_checkpoint(facts),
        *(_prediction(each) for each in facts.predictions[-_PREDICTIONS:]),
        *([] if facts.line is None or facts.ended is not None else [_line(facts.line)]),
        *_disks(facts.disks),
        *(_ports(facts.listeners, facts.untold) if facts.ended is None else ()),
        *_clocks(facts.clocks),
    )


def _manager(facts: Facts) -> list[Finding]:
    if facts.ended is not None:
        return [_ending(facts.ended)]
    if facts.unreachable:
        remedy = "Training may continue without it. Start the same `varuna manager` command again to continue the run."
        return [Finding(Severity.FAULT, "manager", facts.unreachable, remedy)]
    found = [Finding(Severity.OK, "manager", f"answers: {facts.state}")]
    if facts.waits_for:
        text = f"there has been no step for {format_duration(facts.still_s)}: {facts.waits_for}"
        remedy = "docs/runbook.md says what to do by symptom; `varuna logs --first-failure` what broke first."
        found.append(Finding(Severity.FAULT, "steps", text, remedy))
    return found


def _ending(ended: RunEnded) -> Finding:
    text = ended.text.partition("\n")[0]
    if ended.exit_code == 0:
        return Finding(Severity.OK, "run", f"has ended in order: {text}")
    remedy = "`varuna logs --first-failure` shows what the worker wrote. The same command again starts from the newest "
    return Finding(Severity.FAULT, "run", f"failed with exit code {ended.exit_code}: {text}", f"{remedy}checkpoint.")


def _ledger(facts: Facts) -> list[Finding]:
    ledger = facts.ledger
    if ledger is None:
        remedy = "Keep the run's folder as it is. Use the Varuna that the run was started with, or look at its disk."
        return [Finding(Severity.FAULT, "ledger", facts.unreadable, remedy)]
    if ledger.faults:
        more = f" (and {len(ledger.faults) - 1} more)" if len(ledger.faults) > 1 else ""
        remedy = "Samples may be missing or used twice: please report this with the run's folder."
        return [Finding(Severity.FAULT, "ledger", f"{ledger.faults[0]}{more}", remedy)]
    undone = f"; {ledger.undone} steps were rolled back" if ledger.undone else ""
    newest = "the newest " if facts.unaudited else ""
    text = f"{newest}{ledger.steps} steps, {ledger.samples} samples, each used exactly once{undone}"
    return [Finding(Severity.OK, "ledger", text)]


def _workers(facts: Facts) -> list[Finding]:
    if facts.unreachable or facts.ended is not None:
        return []
    if not facts.workers:
        return [Finding(Severity.WARNING, "workers", "there are none", "Start `varuna agent` on a machine.")]
    late = [w for w in facts.workers if w.silent_s is not None and w.silent_s > facts.lease_s]
    found = [
        Finding(
            Severity.WARNING,
            "leases",
            f"{worker.name} on {worker.node} was last heard {format_duration(worker.silent_s or 0.0)} ago; its "
            f"lease is {facts.lease_s:g} s",
            "Look at that machine and its network; `varuna logs --worker` shows what the worker wrote.",
        )
        for worker in late
    ]
    if not late:
        found.append(
            Finding(Severity.OK, "leases", f"{len(facts.workers)} workers, all heard within {facts.lease_s:g} s")
        )
    if facts.single_holders:
        found.append(
            Finding(
                Severity.WARNING,
                "copies",
                f"{facts.single_holders} sections are held by one worker each: losing it falls back to a checkpoint",
                "More workers, or fewer stages (--stages), give a second replica.",
            )
        )
    return found


def _checkpoint(facts: Facts) -> list[Finding]:
    seen = facts.checkpoint
    if seen is None:
        remedy = "Give Trainer(checkpoints=...)."
        return [
            Finding(
                Severity.WARNING,
                "checkpoint",
                "this run keeps none: if all workers are lost, so is their state"
                if facts.ended is None
                else "this run kept none: what it trained is in what the script wrote",
                remedy,
            )
        ]
    if seen.problem:
        remedy = f"`varuna checkpoints verify {seen.directory}` checks all of them. The run falls back to an older one."
        return [Finding(Severity.FAULT, "checkpoint", f"{seen.directory}: {seen.problem}", remedy)]
    if seen.step is None:
        return [
            Finding(
                Severity.WARNING,
                "checkpoint",
                f"{seen.directory} has none yet",
                "The first one has not been written yet." if facts.ended is None else "The run ended before the first.",
            )
        ]
    how = "complete" if seen.read_bytes is None else f"intact ({format_bytes(seen.read_bytes)} read)"
    behind = facts.steps_since_checkpoint
    age = f", {behind} steps ago" if behind is not None and behind >= 0 else ""
    return [Finding(Severity.OK, "checkpoint", f"the newest one, of step {seen.step}{age}, is {how}")]


def _prediction(checked: CheckedPrediction) -> Finding:
    text = (
        f"with plan {checked.shape}, {counted(checked.steps, 'step')} took {format_duration(checked.measured_s)} on "
        f"average, {checked.deviation}"
    )
    if abs(checked.excess) <= TOLERANCE:
        return Finding(Severity.OK, "prediction", text)
    remedy = (
        "The run has corrected its figures since. If it stays so, something else uses these machines or their network: "
        "`varuna timeline` shows where the time goes."
    )
    return Finding(Severity.WARNING, "prediction", text, remedy)


def _line(line: Line) -> Finding:
    if line.is_enough or 1 - line.faster <= TOLERANCE:
        return Finding(Severity.OK, "line", line.in_words())
    remedy = "Use machines that are nearer to each other or have faster networks, or a larger global batch."
    return Finding(Severity.WARNING, "line", line.in_words(), remedy)


def _disks(disks: Sequence[Disk]) -> list[Finding]:
    found = []
    for disk in disks:
        free = (
            f"{format_bytes(disk.free_bytes)} of {format_bytes(disk.size_bytes)} are free for {disk.use} ({disk.path}"
            f"{_on(disk.machine)})"
        )
        if is_full(disk.free_bytes, disk.size_bytes):
            remedy = "Free some space now: nothing more can be written, and a run that must change then ends."
            found.append(Finding(Severity.FAULT, "disk", free, remedy))
        elif disk.free_bytes < FEW_BYTES or disk.free_bytes < FEW_SHARE * disk.size_bytes:
            remedy = "Free some space: a full disk stops logs first, then checkpoints."
            found.append(Finding(Severity.WARNING, "disk", free, remedy))
        else:
            found.append(Finding(Severity.OK, "disk", free))
    return found


def _ports(listeners: Sequence[Listener] | None, untold: Sequence[str]) -> list[Finding]:
    if listeners is None:
        return [Finding(Severity.WARNING, "ports", "this system does not report which ports are open", "")]
    found = [
        Finding(
            Severity.FAULT,
            "ports",
            f"{each.process}{_on(each.machine)} accepts connections on {each.address} port {each.port}, which is not a "
            "private address",
            "Tensors and their rendezvous are not encrypted. Give --interface (or --host) a private address.",
        )
        for each in listeners
        if not each.is_manager_port and is_exposed(each.address)
    ]
    silent = f"; {_named(untold)} do not report" if untold else ""
    machines = {each.machine for each in listeners} - {""}
    where = f"this machine and {len(machines)} others" if machines else "this machine"
    text = f"{len(listeners)} open on {where}, only the manager's in public{silent}"
    return found or [Finding(Severity.OK, "ports", text)]


def _on(machine: str) -> str:
    return f" on {machine}" if machine else ""


def _named(machines: Sequence[str]) -> str:
    return " and ".join(machines) if len(machines) < 4 else f"{len(machines)} machines"


def is_exposed(address: str) -> bool:
    """Return whether strangers may reach a listening address: a public one, or all of the machine's."""
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_unspecified or (mapped or found).is_global


def _clocks(clocks: Sequence[ClockReading]) -> list[Finding]:
    found = []
    for clock in clocks:
        if abs(clock.ahead_s) > CLOCK_SKEW_S:
            way = "ahead of" if clock.ahead_s > 0 else "behind"
            text = f"the clock of {clock.machine} is {format_duration(abs(clock.ahead_s))} {way} this machine's"
            remedy = "Training does not depend on clocks, but certificates, leases of buckets and logs do: run NTP."
            found.append(Finding(Severity.WARNING, "clock", text, remedy))
    if clocks and not found:
        found.append(Finding(Severity.OK, "clock", f"{len(clocks)} compared, all within {CLOCK_SKEW_S:g} s"))
    return found
