"""Jobs of a run in Slurm's queue, as ``squeue`` shows them, and what to do about them. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from varuna.core.errors import FleetError

_FIELDS = ("JobArrayID", "State", "Reason", "NodeList", "StartTime", "EndTime", "RestartCnt", "PreemptTime")
FORMAT = ",".join(f"{field}:100|" for field in _FIELDS)
"""For ``squeue -O``: wide enough that nothing is cut off."""
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_RUNNING = frozenset({"RUNNING", "SUSPENDED", "RESIZING", "SIGNALING", "STOPPED", "STAGE_OUT"})
_LEAVING = "COMPLETING"
_FAILED = frozenset({"FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"})
_CANCELLED = re.compile(r"CANCELLED AT \S+ \*\*\*")
"""Line that Slurm adds to a job's output once a person cancels it. Other reasons follow the time: DUE TO PREEMPTION."""
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "NONE", "N/A", "(NULL)", ""})


@dataclass(frozen=True)
class SlurmJob:
    """One job of one node, as it is now; ``number`` is ``12_3``, of its array and its place there."""

    number: str
    state: str
    reason: str = ""
    node: str = ""
    has_ended: bool = False
    """It will not run again, though it may still have its notice."""
    ran_s: float = 0.0
    """Seconds from its last start to its end; 0 as long as it has none."""
    restarts: int = 0

    @property
    def is_waiting(self) -> bool:
        """It is in the queue, or will be again."""
        return self.state in _WAITING or (self.state == _LEAVING and not self.has_ended)

    @property
    def is_running(self) -> bool:
        """It has a node."""
        return self.state in _RUNNING

    @property
    def is_there(self) -> bool:
        """It has a node, or will have one."""
        return self.is_waiting or self.is_running

    @property
    def has_failed(self) -> bool:
        """It ended by an error of its own."""
        return self.state in _FAILED

    def is_cancelled(self, said: str) -> bool:
        """Return whether somebody has cancelled it.

        Args:
            said: the end of its output. Its state does not tell before its notice is over.
        """
        return self.state == "CANCELLED" or (self.has_ended and _CANCELLED.search(said) is not None)


def read_jobs(text: str) -> list[SlurmJob]:
    """Read the lines that ``squeue -O`` printed in ``FORMAT``.

    Raises:
        FleetError: a line is something else.
    """
    return [_read_job(line) for line in text.splitlines() if line.strip()]


def _read_job(line: str) -> SlurmJob:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) <= len(_FIELDS):
        raise FleetError(
            f"squeue printed {line.strip()[:80]!r}, which is not understood: Slurm 20.11 or newer is needed"
        )
    number, state, reason, node, start, end, restarts, preempted = fields[: len(_FIELDS)]
    begin_s, end_s = _moment_s(start), _moment_s(end)
    is_over = state not in _WAITING | _RUNNING | {_LEAVING}
    has_ended = is_over or (state == _LEAVING and end_s is not None and _moment_s(preempted) is None)
    return SlurmJob(
        number=number,
        state=state,
        reason="" if reason == "None" else reason,
        node="" if node in ("(null)", "N/A") else node,
        has_ended=has_ended,
        ran_s=end_s - begin_s if has_ended and begin_s is not None and end_s is not None else 0.0,
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def _moment_s(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None  # N/A, NONE, Unknown


def to_cancel(jobs: Iterable[SlurmJob], wanted: int) -> list[str]:
    """Numbers of those that are too many: those that wait first, and of each kind the newest."""
    there = sorted((job for job in jobs if job.is_there), key=lambda job: (job.is_waiting, _age(job)), reverse=True)
    return [job.number for job in there[: max(0, len(there) - wanted)]]


def to_hurry(jobs: Iterable[SlurmJob]) -> list[str]:
    """Numbers of those that Slurm makes wait for two minutes, only because they were requeued."""
    return [job.number for job in jobs if job.state == "PENDING" and job.restarts and job.reason == "BeginTime"]


def why_waiting(jobs: Collection[SlurmJob], known: Collection[str]) -> str:
    """A few words on jobs that waited already when ``known`` were looked at; empty if there are none."""
    there = [job for job in jobs if job.is_there]
    waiting = [job for job in there if job.is_waiting and job.number in known and job.reason not in ("", "BeginTime")]
    if not waiting:
        return ""
    reasons = ", ".join(reason for reason, _ in Counter(job.reason for job in waiting).most_common(3))
    return f"{len(waiting)} of {len(there)} jobs wait in the queue ({reasons})"


def minutes_of(limit: str) -> float | None:
    """A time limit as Slurm writes it, in minutes; None for unlimited.

    Raises:
        ValueError: it is none.
    """
    if limit.upper() in _UNLIMITED:
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) < 3:  # M, M:S
        hours, minutes, seconds = [0, *parts, 0][:3]
    else:
        hours, minutes, seconds = parts
    return 1440.0 * int(days or 0) + 60.0 * hours + minutes + seconds / 60.0


def _age(job: SlurmJob) -> tuple[int, ...]:
    return tuple(int(part) for part in job.number.split("_") if part.isdigit())
