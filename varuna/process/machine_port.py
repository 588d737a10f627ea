"""One port of a machine for all of its workers: the first word of a call says whom it is for.

The machine's agent accepts and reads that word, and passes the connection itself to the worker that waits for it
(``SCM_RIGHTS``); no byte of what follows goes through the agent. Here is the worker's side, and what both must know.
"""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import NamedTuple

WORD_BYTES = 16
"""Length of a word: hexadecimal digits that cannot be guessed."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ANSWER_S = 10.0
_MOST_BYTES = 4096


class Address(NamedTuple):
    """A TCP address at which something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PortFacts(NamedTuple):
    """Facts about the machine's port that an agent tells workers."""

    announced: Address
    """the address at which machines elsewhere reach it"""
    port: int
    """the same port on this machine"""


class PortError(RuntimeError):
    """Error: the agent does not let this worker wait at the machine's port."""


class Waiting:
    """Waits at the machine's port for calls that begin with a word; ``close`` gives the word up.

    Args:
        path: the agent's socket.
        word: that callers say.

    Raises:
        PortError: no agent answers there.
    """

    def __init__(self, path: str, word: str) -> None:
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._agent.settimeout(_ANSWER_S)
            self._agent.connect(path)
            self._agent.send(word.encode())
            announced, port = json.loads(self._agent.recv(_MOST_BYTES))
            self.facts = PortFacts(Address(*announced), port)
        except (OSError, ValueError) as error:
            self._agent.close()
            raise PortError(
                f"the agent that started this worker does not answer at {path}, where it hands over what comes in at "
                f"the machine's port ({error}). Has it ended? Its log says why"
            ) from error
        self._agent.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a call has come."""
        return self._agent.fileno()

    def accept(self) -> socket.socket:
        """Take over a connection whose word has been read.

        Raises:
            OSError: there is none just now.
            PortError: the agent is gone.
        """
        said, numbers, _, _ = socket.recv_fds(self._agent, 1, 1)
        if not said:
            raise PortError("the agent that hands over what comes in at the machine's port has ended")
        if not numbers:
            raise OSError("the system passed no connection: too many files are open in this process")
        os.set_inheritable(numbers[0], False)
        return socket.socket(fileno=numbers[0])

    def close(self) -> None:
        """Wait no longer; what has been handed over and not taken is closed."""
        with contextlib.suppress(OSError, PortError):
            while True:
                self.accept().close()
        self._agent.close()


def hand_over(worker: socket.socket, connected: socket.socket) -> None:
    """Pass a connection to the worker that waits for it.

    Raises:
        OSError: it is gone, or takes nothing.
    """
    socket.send_fds(worker, [b"+"], [connected.fileno()])


def network_stack() -> str:
    """Name this machine's network, or that of this container: processes with the same one reach each other by it."""
    with contextlib.suppress(OSError):  # no Linux
        return f"{_BOOT.read_text().strip()}/{os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()
