"""Nodes on this machine: processes, each of which stands for a VM."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from varuna.core.errors import FleetError
from varuna.fleet.clouds.provider import CapacityError

_END_S = 5.0


class LocalProvider:
    """Keeps as many processes of one command alive as are requested.

    Args:
        command: of the node with this number, such as an agent's; numbers are never used twice.
        most: processes that this machine can carry; more are refused, as a cloud does without capacity.
        environment: more variables for the processes.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        most: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._most = command, most
        self._environment = {**os.environ, **(environment or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def resize(self, nodes: int) -> None:
        """Start what is missing; the youngest are ended first.

        Raises:
            CapacityError: this machine carries no more.
            FleetError: the command cannot be started.
        """
        self._forget_the_dead()
        while len(self._processes) > nodes:
            _end(self._processes.pop())
        room = nodes if self._most is None else min(nodes, self._most)
        while len(self._processes) < room:
            command = self._command(self._started)
            try:
                process = subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise FleetError(f"{command[0]} cannot be started: {error.strerror}. Name another command.") from error
            self._started += 1
            self._processes.append(process)
        if room < nodes:
            raise CapacityError(f"this machine carries {self._most} nodes")

    def size(self) -> int:
        """Processes that live."""
        self._forget_the_dead()
        return len(self._processes)

    def close(self) -> None:
        """End them all."""
        for process in self._processes:
            _end(process)
        self._processes.clear()

    def _forget_the_dead(self) -> None:
        self._processes = [process for process in self._processes if process.poll() is None]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to its process group, then SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
