"""One run at a time in a checkpoint directory.

A lease is an object ``lease/<epoch>.json`` that its owner rewrites again and again with a growing count. The newest
epoch counts, and is taken by a create-only put, so of several claimants one gets it. Whether another owner lives is
told by its process, if it runs on this machine; elsewhere by watching whether the count grows: clocks of different
machines are never compared.
"""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from varuna.core.errors import CheckpointError, ObjectExists, ObjectMissing
from varuna.core.value import Value
from varuna.store.base import Store

BEAT_S = 5.0
EXPIRY_S = 20.0
"""A count that does not grow for this long belongs to a run that is gone, or hung."""
_FOLDER = "lease"


class LeaseOwner(Value):
    """The owner of a lease, and how often it has renewed it."""

    writer: str
    host: str
    machine: str
    pid: int
    started: str
    beats: int = 0
    is_over: bool = False
    """it has released the directory. Its file stays, since an epoch is never used twice"""


class Lease:
    """The right to commit, held until another run takes it."""

    def __init__(self, store: Store, epoch: int, owner: LeaseOwner) -> None:
        self._store, self._epoch, self._owner = store, epoch, owner

    def beat(self) -> None:
        """Report that this run lives; does nothing once another run has taken over."""
        if self.is_held():
            self._owner = self._owner.model_copy(update={"beats": self._owner.beats + 1})
            self._store.put(_name(self._epoch), self._owner.model_dump_json().encode())

    def is_held(self) -> bool:
        """Return whether no other run has taken over.

        The epoch alone does not tell: a person may have removed all leases, and some stores accept two first ones.
        Our own is read by its name, since a listing may not show it yet.
        """
        owner = _read(self._store, self._epoch)
        if owner is None or owner.writer != self._owner.writer or owner.is_over:
            return False
        return max(_epochs(self._store), default=0) <= self._epoch

    def is_missing(self) -> bool:
        """Return whether there is no lease: it was removed by hand, or another run took over and has ended."""
        return _read(self._store, self._epoch) is None and not _epochs(self._store)

    def renew(self) -> bool:
        """Write a missing lease again; False if another run was faster."""
        try:
            self._store.create(_name(self._epoch), self._owner.model_dump_json().encode())
        except ObjectExists:
            return False
        return self.is_held()

    def release(self) -> None:
        """Note that the run is over, so that the next one need not wait; that gets an epoch of its own."""
        self._owner = self._owner.model_copy(update={"is_over": True})
        self._store.put(_name(self._epoch), self._owner.model_dump_json().encode())


def claim(
    store: Store,
    writer: str,
    *,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Become the one run that commits here; waits up to 20 s if the previous owner cannot be checked.

    Args:
        store: the checkpoint directory.
        writer: an id that no other run has.
        say: tells the user why there is a wait.
        clock: seconds, of this machine.
        sleep: waits.

    Raises:
        CheckpointError: another run lives.
        StoreError: the store cannot be used.
    """
    me = LeaseOwner(
        writer=writer,
        host=socket.gethostname(),
        machine=process_scope(),
        pid=os.getpid(),
        started=process_started("self"),
    )
    while True:
        epochs = _epochs(store)
        if epochs:
            owner = _read(store, epochs[-1])
            if owner is not None and not owner.is_over and _lives(store, epochs[-1], owner, me, say, clock, sleep):
                raise CheckpointError(
                    f"another run, process {owner.pid} on {owner.host}, saves its checkpoints in {store.url}. Stop "
                    "it, or use another checkpoint directory for this run."
                )
        epoch = epochs[-1] + 1 if epochs else 1
        try:
            store.create(_name(epoch), me.model_dump_json().encode())
        except ObjectExists:
            sleep(BEAT_S / 2)  # another run was faster: it lives, and listings show that soon
            continue
        # Only after the new one is there: at no moment is there none, which would mean that a person removed it.
        for old in epochs:
            store.remove(_name(old))
        return Lease(store, epoch, me)


def _lives(
    store: Store,
    epoch: int,
    owner: LeaseOwner,
    me: LeaseOwner,
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    if owner.machine == me.machine:
        if owner.pid == me.pid:
            return False  # an earlier run of this process: it is over, or it could not be asking
        return _exists(owner)
    say(
        f"{store.url} was last used by process {owner.pid} on {owner.host}: waiting {EXPIRY_S:.0f} s to see whether "
        "it still runs"
    )
    begin_s = clock()
    while clock() - begin_s < EXPIRY_S:
        sleep(BEAT_S / 2)
        now = _read(store, epoch)
        if now is None or now.is_over:
            return False
        if now.beats != owner.beats:
            return True
    return False


def _read(store: Store, epoch: int) -> LeaseOwner | None:
    try:
        return LeaseOwner.model_validate_json(store.get(_name(epoch)))
    except (ObjectMissing, ValidationError):
        return None


def _epochs(store: Store) -> list[int]:
    """List the epochs of all leases, ascending."""
    stems = (Path(entry.name).stem for entry in store.entries(_FOLDER))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _name(epoch: int) -> str:
    return f"{_FOLDER}/{epoch:06d}.json"


def _exists(owner: LeaseOwner) -> bool:
    """Return whether a process of this machine wrote ``owner``, and is not another one with its process number."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's, but it exists
    return owner.started == process_started(str(owner.pid)) and not has_ended(owner.pid)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, and only its number is left: in a container it may never be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False


def process_scope(proc: Path = Path("/proc")) -> str:
    """Return the scope of process numbers: a boot of a machine, and a namespace of processes within it."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(proc / 'self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def process_started(process: str) -> str:
    """Return the moment at which a process began, in the kernel's ticks; empty where the kernel does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
