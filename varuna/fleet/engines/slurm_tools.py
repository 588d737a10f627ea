"""Slurm's own commands, each bounded in time: sbatch, squeue, scancel, scontrol."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from varuna.core.errors import FleetError, UsageError
from varuna.fleet.engines.provider import CapacityError
from varuna.fleet.engines.slurm_queue import FORMAT, SlurmJob, minutes_of, read_jobs
from varuna.fleet.net.join_string import JOIN_VARIABLE

_BOUND_S = 25.0
_LEAST_MINUTES = 10.0
"""A node needs a minute or two to take part; below this, little is left."""
_AWAY = (
    *("unable to contact", "timed out", "temporarily", "connection refused", "not responding", "zero bytes"),
    *("communication", "connect failure", "connection failure", "configuration source"),
)
_TOO_MANY = ("violates accounting/qos", "submitjob", "maxsubmit", "invalid job array", "too many")


class SlurmAwayError(CapacityError):
    """Slurm's controller does not answer; it may later."""


class TooManyJobsError(CapacityError):
    """The queue takes no more jobs of this user now."""


def check_installed() -> None:
    """Find out that Slurm's commands are here.

    Raises:
        UsageError: they are not.
    """
    missing = [tool for tool in ("sbatch", "squeue", "scancel", "scontrol") if shutil.which(tool) is None]
    if missing:
        raise UsageError(
            f"--on slurm needs {', '.join(missing)}, which this machine does not have. Start the command on a login "
            "node of the cluster, or in a job there."
        )


def jobs_named(name: str) -> list[SlurmJob]:
    """Jobs of this user with this name, also those that ended in the last minutes.

    Raises:
        CapacityError: Slurm does not answer.
        FleetError: squeue printed something else.
    """
    user = f"--user={os.getuid()}"
    return read_jobs(_call("squeue", "--noheader", "--array", "--states=all", user, f"--name={name}", "-O", FORMAT))


def submit(flags: Sequence[str], script: Path) -> str:
    """Submit a job or an array; returns its number.

    Raises:
        CapacityError: not now; ``TooManyJobsError`` if fewer at a time may do.
        FleetError: never.
    """
    return _call("sbatch", "--parsable", *flags, str(script)).strip().partition(";")[0]


def cancel(numbers: Sequence[str]) -> None:
    """Cancel jobs; those that are gone already do not matter.

    Raises:
        CapacityError: Slurm does not answer.
    """
    if numbers:
        _call("scancel", "--quiet", *numbers)


def start_now(number: str) -> None:
    """Let a requeued job start as soon as there is room; one that may not be changed waits its two minutes."""
    try:
        _call("scontrol", "update", f"JobId={number}", "StartTime=now")
    except FleetError:
        return


def check_request(flags: Sequence[str], time_limit: str, partition: str) -> None:
    """Ask Slurm whether it would take such jobs.

    Raises:
        UsageError: it would not; says why, in Slurm's words.
        CapacityError: Slurm does not answer.
    """
    try:
        _call("sbatch", "--test-only", *flags, "--wrap=true")
    except CapacityError:
        raise
    except FleetError as error:
        known = _call("sinfo", "--noheader", "-o", "%R").split() if "partition" in str(error).lower() else []
        there = f" Partitions of this cluster: {', '.join(dict.fromkeys(known))}." if known else ""
        raise UsageError(
            f"{error}.{there} Look at --partition, --account, --time, --gpus-per-node and --sbatch."
        ) from error
    limit = time_limit or _limit_of(partition)
    try:
        minutes = minutes_of(limit)
    except ValueError:
        return  # Slurm has just accepted it
    if minutes is not None and minutes < _LEAST_MINUTES:
        whose = "--time" if time_limit else "the partition's default time limit"
        raise UsageError(
            f"{whose} is {limit}, and a node needs a minute or two before it takes part: give --time, of at least "
            f"{_LEAST_MINUTES:.0f} minutes, such as --time 4:00:00. A run goes on in new jobs when a limit is reached."
        )


def _limit_of(partition: str) -> str:
    """The time limit of jobs that name none."""
    for line in _call("scontrol", "--oneliner", "show", "partition", *([partition] if partition else [])).splitlines():
        facts = dict(word.partition("=")[::2] for word in line.split())
        if partition or facts.get("Default") == "YES":
            default = facts.get("DefaultTime", "NONE")
            return facts.get("MaxTime", "NONE") if default == "NONE" else default
    return "NONE"


def _call(tool: str, *arguments: str) -> str:
    """Run a tool of Slurm's, and return what it printed.

    Raises:
        CapacityError: Slurm does not answer, or the queue is full.
        FleetError: it refused.
    """
    # A job's own variables would be taken for wishes, if this process is one; the JOIN string is a secret.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or not (name.startswith(("SLURM_", "SBATCH_", "SQUEUE_")) or name == JOIN_VARIABLE)
    }
    try:
        done = subprocess.run(
            [tool, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_BOUND_S,
            start_new_session=True,  # Ctrl-C is not for it
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmAwayError(f"{tool} did not answer for {_BOUND_S:.0f} s") from error
    except OSError as error:
        raise SlurmAwayError(f"{tool} could not be started: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout.decode(errors="replace")
    words = _words(done.stderr.decode(errors="replace"))
    for kind, signs in ((TooManyJobsError, _TOO_MANY), (SlurmAwayError, _AWAY)):
        if any(sign in words.lower() for sign in signs):
            raise kind(f"{tool} says: {words}")
    raise FleetError(f"{tool} says: {words or f'nothing, and ended with {done.returncode}'}")


def _words(stderr: str) -> str:
    """The last two lines, without the names of who says them."""
    lines = [line.rpartition("error: ")[2].strip() for line in stderr.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[-2:]))
