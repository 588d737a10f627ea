"""Read the facts of a run: the manager's answers, the journal, checkpoints, sockets, disks."""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from varuna.checkpoint.io import restore
from varuna.checkpoint.manifest import Manifest, newest_intact, survey
from varuna.core.errors import CheckpointError, UsageError, VarunaError
from varuna.core.plan import Copies
from varuna.extras.doctor.diagnose import CheckpointSeen, ClockReading, Disk, Facts, Listener, WorkerSeen
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.net import listening_sockets
from varuna.fleet.run_folder.connection_file import Access
from varuna.fleet.run_folder.past_events import NewestEvents, ending, kept_job, newest_events
from varuna.fleet.state.run_events import RunEnded
from varuna.observe.predictions import checked_predictions
from varuna.planner.line import Line
from varuna.store.base import Store
from varuna.store.opening import is_local, open_store
from varuna.store.retry import SHOWN_S, impatient

READ_S = 120.0
"""Seconds that reading 16 MiB of a checkpoint may take, over a slow line."""
AUDITED_STEPS = 20_000
"""The newest ones, whose samples are counted: a second's work."""


def gather(folder: Path, access: Access, *, reads: bool) -> Facts:
    """Read the facts of the run in ``folder``.

    Args:
        folder: the run's folder.
        access: how to reach its manager.
        reads: also read every byte of the newest checkpoint.
    """
    (events, unaudited), unreadable = _events(folder)
    status, clocks, unreachable = _ask(access)
    ended = _ending(folder) if unreachable else None
    hosts = {} if unreachable else _ask_of_hosts(access)
    listeners = _listeners(access) if ended is None else ()
    directory = status.get("checkpoint_dir") if not unreachable else _kept_directory(folder)
    seen = look_at_checkpoints(directory, reads=reads) if isinstance(directory, str) else None
    step = status.get("step")
    plan = status.get("plan") or {}
    return Facts(
        state=str(status.get("state", "")),
        still_s=float(status.get("still_s") or 0.0),
        waits_for=str(status.get("waits_for") or ""),
        unreachable=unreachable,
        ended=ended,
        ledger=None if unreadable else audit(events, is_cut=unaudited > 0),
        unaudited=unaudited,
        unreadable=unreadable,
        lease_s=float(status.get("lease_s", 6.0)),
        workers=tuple(
            WorkerSeen(worker["name"], worker["node"], worker["state"], worker["silent_s"])
            for worker in status.get("workers", ())
        ),
        single_holders=int(plan["sections"]) if plan.get("replicas") == 1 and not _copied(plan) else 0,
        checkpoint=seen,
        steps_since_checkpoint=step + 1 - seen.step if seen and seen.step is not None and step is not None else None,
        line=None if unreachable else _line_of(access),
        predictions=() if unreadable else checked_predictions(events),
        disks=(*_disks(folder, directory), *_disks_of(hosts)),
        listeners=None if listeners is None else (*listeners, *_listeners_of(hosts)),
        untold=tuple(name for name, host in hosts.items() if host.get("ports") is None),
        clocks=(*clocks, *_clocks_of(hosts, clocks)),
    )


def _copied(plan: Mapping[str, Any]) -> bool:
    """Return whether the state of each stage has a copy in another worker's memory."""
    return plan.get("copies") == Copies.STATE.value


def _events(folder: Path) -> tuple[NewestEvents, str]:
    """Read the newest events of the run's journal, or say why it cannot be read."""
    try:
        return newest_events(folder, AUDITED_STEPS), ""
    except VarunaError as error:
        return NewestEvents((), 0), str(error)


def _ending(folder: Path) -> RunEnded | None:
    """Read the end of the newest run in the folder; None if it has not ended."""
    with suppress(UsageError):  # the journal cannot be read, which is a finding of its own
        return ending(folder)
    return None


def _kept_directory(folder: Path) -> str | None:
    """Read from the run's folder where it keeps checkpoints that outlive it, for when no manager says so."""
    with suppress(UsageError):  # the journal cannot be read, which is a finding of its own
        job = kept_job(folder)
        return job.checkpoint_dir if job is not None and not job.rescues else None
    return None


def _ask(access: Access) -> tuple[Mapping[str, Any], tuple[ClockReading, ...], str]:
    """Ask for status and clocks; return them, or the reason why there are none."""
    try:
        before_s = time.time()
        answer = access.remote().get("/status")
        after_s = time.time()
    except VarunaError as error:
        return {}, (), str(error)
    if answer.status >= 300:
        return {}, (), f"the manager answers with HTTP {answer.status}: this folder's token is not its own"
    status: Mapping[str, Any] = json.loads(answer.body)
    return status, _clocks(answer.headers, (before_s + after_s) / 2), ""


def _line_of(access: Access) -> Line | None:
    """Return the line that the plan needs, by what the run has measured; None: not known."""
    try:
        answer = access.remote().get("/plans")
    except VarunaError:
        return None
    table = json.loads(answer.body) if answer.status < 300 else {}
    line = table.get("running", {}).get("line") if table.get("measured") else None
    return None if line is None else Line.model_validate(line)


def _ask_of_hosts(access: Access) -> Mapping[str, Mapping[str, Any]]:
    """Ask for agents' reports about their machines; empty if the manager went away meanwhile."""
    try:
        answer = access.remote().get("/hosts")
    except VarunaError:
        return {}
    hosts: Mapping[str, Mapping[str, Any]] = json.loads(answer.body) if answer.status < 300 else {}
    return hosts


def _clocks(headers: Mapping[str, str], now_s: float) -> tuple[ClockReading, ...]:
    told = {name.lower(): value for name, value in headers.items()}.get("date")
    if told is None:
        return ()
    return (
        ClockReading("the manager", parsedate_to_datetime(told).timestamp() + 0.5 - now_s),
    )  # it tells whole seconds


def look_at_checkpoints(directory: str, *, reads: bool) -> CheckpointSeen:
    """Find the newest checkpoint of a directory, and whether it can be used."""
    try:
        store = impatient(open_store(directory), SHOWN_S, SHOWN_S)
        if not any(folder.is_committed for folder in survey(store)):
            return CheckpointSeen(directory, None)
        found = newest_intact(store)
        assert found is not None, "there is a committed one"
        manifest, warnings = found
        if warnings:
            return CheckpointSeen(directory, manifest.step, warnings[0])
        read_bytes = _read(store, manifest) if reads else None
    except CheckpointError as error:
        return CheckpointSeen(directory, None, str(error))
    return CheckpointSeen(directory, manifest.step, read_bytes=read_bytes)


def _read(store: Store, manifest: Manifest) -> int | None:
    """Compare every byte; None if newer checkpoints have replaced this one while it was read.

    Raises:
        CheckpointError: bytes are not those that were written.
    """
    store = impatient(store, SHOWN_S, READ_S)
    try:
        return sum(shard.size_bytes for shard in restore.verify(store, manifest))
    except CheckpointError:
        if any(folder.step == manifest.step and folder.is_committed for folder in survey(store)):
            raise
        return None


def _disks(folder: Path, directory: object) -> tuple[Disk, ...]:
    places = {"the run's journal and logs": folder}
    if isinstance(directory, str) and is_local(directory):
        places["checkpoints"] = Path(directory)
    found = []
    for use, path in places.items():
        if path.exists():
            usage = shutil.disk_usage(path)
            found.append(Disk(use, str(path), usage.free, usage.total))
    return tuple(found)


def _disks_of(hosts: Mapping[str, Mapping[str, Any]]) -> tuple[Disk, ...]:
    """List the disks that agents report; those of this machine's agents are the same disk once."""
    return tuple(
        Disk(disk["use"], disk["path"], disk["free_bytes"], disk["size_bytes"], name)
        for name, host in hosts.items()
        for disk in host.get("disks") or ()
    )


def _listeners_of(hosts: Mapping[str, Mapping[str, Any]]) -> tuple[Listener, ...]:
    return tuple(
        Listener(f"process {port['pid']}", port["address"], port["port"], machine=name)
        for name, host in hosts.items()
        for port in host.get("ports") or ()
    )


def _clocks_of(hosts: Mapping[str, Mapping[str, Any]], managers: tuple[ClockReading, ...]) -> tuple[ClockReading, ...]:
    """Clocks of agents, each compared with the manager's, and that one with this machine's."""
    more_s = managers[0].ahead_s if managers else 0.0
    ahead_s = {name: host.get("clock_ahead_s") for name, host in hosts.items()}
    return tuple(ClockReading(name, found + more_s) for name, found in ahead_s.items() if found is not None)


def _listeners(access: Access) -> tuple[Listener, ...] | None:
    """List the sockets of the manager and of the processes that it has started; empty if it is on another machine."""
    if not listening_sockets.available():
        return None
    manager = listening_sockets.owner_of(access.port)
    if manager is None:
        return ()
    return tuple(
        Listener(
            "the manager" if each.pid == manager else f"process {each.pid}",
            each.address,
            each.port,
            is_manager_port=each.pid == manager and each.port == access.port,
        )
        for each in listening_sockets.listening(listening_sockets.family_of(manager))
    )
