"""Facts that an agent tells of its machine: its clock, how full its disks are, and where its processes listen.

``varuna doctor`` looks at them from the manager's side; nothing in a run depends on them.
"""

import os
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Annotated

from pydantic import Field

from varuna.core.value import Value
from varuna.fleet.net import listening_sockets

_LOOK_S = 30.0
_MOST_DISKS, _MOST_PORTS = 8, 64
_PULSES_KEPT = 16

Path4k = Annotated[str, Field(max_length=4096)]


class DiskFacts(Value):
    """A file system that an agent or its workers write to."""

    use: str = Field(max_length=64)
    path: Path4k
    free_bytes: int = Field(ge=0)
    size_bytes: int = Field(ge=0)


class PortFacts(Value):
    """A socket on which the agent, or a process that it has started, accepts connections from other machines."""

    pid: int
    address: str = Field(max_length=64)
    port: int = Field(ge=0, le=65535)


class HostFacts(Value):
    """A machine, looked at every 30 s."""

    disks: tuple[DiskFacts, ...] = Field(default=(), max_length=_MOST_DISKS)
    ports: tuple[PortFacts, ...] | None = Field(
        default=None, max_length=_MOST_PORTS, description="None: this system does not tell"
    )


def look_at_host(folder: Path) -> HostFacts:
    """This machine, with the disks of an agent's ``folder`` and of temporary files; may take as long as a disk does."""
    places = {"the agent's folder and its workers' logs": folder, "temporary files": Path(tempfile.gettempdir())}
    disks: dict[int, DiskFacts] = {}
    for use, path in places.items():
        try:
            device, usage = path.stat().st_dev, shutil.disk_usage(path)
        except OSError:
            continue
        if device not in disks:
            disks[device] = DiskFacts(use=use, path=str(path)[:4096], free_bytes=usage.free, size_bytes=usage.total)
    return HostFacts(disks=tuple(disks.values()), ports=_ports())


def _ports() -> tuple[PortFacts, ...] | None:
    if not listening_sockets.available():
        return None
    found = listening_sockets.listening(listening_sockets.family_of(os.getpid()))
    outside = [each for each in found if not each.address.startswith("127.") and each.address != "::1"]
    return tuple(PortFacts(pid=each.pid, address=each.address, port=each.port) for each in outside[:_MOST_PORTS])


class HostWatch:
    """Looks again and again, on a thread of its own: a disk that hangs must hold up nobody."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._closed = folder, threading.Event()
        self.newest: HostFacts | None = None
        """None before the first look."""

    def start(self) -> None:
        """Start watching."""
        threading.Thread(target=self._stay, name="varuna-host", daemon=True).start()

    def stop(self) -> None:
        """Stop watching soon."""
        self._closed.set()

    def _stay(self) -> None:
        while not self._closed.is_set():
            self.newest = look_at_host(self._folder)
            self._closed.wait(_LOOK_S)


class HostView:
    """The manager's view of one machine, from what its agent has told."""

    def __init__(self) -> None:
        self._ahead_s: deque[float] = deque(maxlen=_PULSES_KEPT)
        self._facts: HostFacts | None = None

    def note_pulse(self, ahead_s: float, facts: HostFacts | None) -> None:
        """Note a pulse; when it arrived, the machine's clock had shown ``ahead_s`` more than this one's."""
        self._ahead_s.append(ahead_s)
        self._facts = facts or self._facts

    def describe(self) -> dict[str, object]:
        """The view as plain JSON values. The clock is that of the pulse that travelled for the shortest time."""
        ahead_s = max(self._ahead_s) if self._ahead_s else None
        return {"clock_ahead_s": ahead_s, **(self._facts.model_dump() if self._facts is not None else {})}
