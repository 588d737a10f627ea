"""Real wires for ranks that are forks of one process: each enters a host of its own, a network namespace.

Imports the standard library only: the peers' environment, which has no Varuna, uses it too.
"""

import ctypes
import json
import os
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from tests.scenarios.network import NAMESPACE, Network

_WIRES = "BENCHMARK_WIRES"
_WIDTH, _WIDE = 1024, 32_768
_CLONE_NEWNET = 0x40000000
_setns: Callable[..., int] = ctypes.CDLL(None, use_errno=True).setns


class _Host(NamedTuple):
    namespace: str
    address: str


def described(network: Network) -> dict[str, str]:
    """For the environment of a process whose ranks live on these hosts, one each."""
    hosts = [_Host(network.environment(host)[NAMESPACE], address) for host, address in network.addresses.items()]
    return {_WIRES: json.dumps(hosts)}


def width() -> int:
    """Numbers in a row of a message: 8 KiB a message are enough where lines are emulated, else it is 256 KiB."""
    return _WIDE if _hosts() else _WIDTH


def enter(rank: int) -> None:
    """Move this thread, and those that it starts, to the host of ``rank``, if there are hosts; all meet at the first.

    Before there are other threads that use the network.

    Raises:
        OSError: the host cannot be entered.
    """
    hosts = _hosts()
    if hosts:
        with open(hosts[rank].namespace, "rb") as entrance:
            move_to(entrance)
        os.environ.update(MASTER_ADDR=hosts[0].address, VARUNA_INTERFACE=hosts[rank].address, GLOO_SOCKET_IFNAME="eth0")


def move_to(entrance: BinaryIO) -> None:
    """Move this thread, and those that it starts, to the host whose network namespace this file is.

    Raises:
        OSError: it cannot be entered.
    """
    if _setns(entrance.fileno(), _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter it: {os.strerror(number)}", entrance.name)


def _hosts() -> list[_Host]:
    return [_Host(*each) for each in json.loads(os.environ.get(_WIRES, "[]"))]
