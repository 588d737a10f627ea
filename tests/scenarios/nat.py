"""Hosts behind address translation (NAT), with lines that are long and lose packets: in user space, on TUN devices.

Each host is a network namespace with one device, and this program is all that lies between them: it reads their
packets, translates addresses as home routers and clouds do, holds them up, and loses some. Machines behind two NATs
have the same private address. What nobody inside has called, and no port is mapped for, gets no answer.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TypeVar

from tests.scenarios.network import NAMESPACE

T = TypeVar("T")
PRIVATE = "192.168.0.2"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1
_TCP = 6
_FIRST_PORT = 20_000
_PACKET_BYTES = 2**16
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Host:
    """A machine; ``public`` is its own address, or that of the NAT before it."""

    public: str
    is_behind_nat: bool = False
    mapped: Mapping[str, int] = field(default_factory=dict)
    """By port of the NAT: the host's own."""

    @property
    def own(self) -> str:
        return PRIVATE if self.is_behind_nat else self.public


@cache
def why_not() -> str:
    """Say why there can be no such hosts here; empty if there can."""
    try:
        with contextlib.closing(Hosts({"a": Host("10.78.0.1")})):
            return ""
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"no TUN devices in namespaces here: {error}"


class Hosts:
    """Hosts by name; nothing outlives the process that holds their namespaces, which dies with this one."""

    def __init__(self, hosts: Mapping[str, Host], *, delay_s: float = 0.0, lost: float = 0.0) -> None:
        """``delay_s`` is of each packet, one way; of all, a part ``lost`` does not arrive."""
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._router: subprocess.Popen[bytes] | None = None
        devices: list[int] = []
        try:
            for name, host in hosts.items():
                self._holders[name] = _hold()
                devices.append(self.inside(name, _device))
                for command in (
                    f"address add {host.own}/32 dev eth0",
                    "link set eth0 up",
                    "link set lo up",
                    "route add default dev eth0",
                ):
                    self._ip(name, command)
            setting = {"hosts": [asdict(host) for host in hosts.values()], "delay_s": delay_s, "lost": lost}
            router = [sys.executable, "-m", "tests.scenarios.nat", json.dumps(setting), *map(str, devices)]
            self._router = subprocess.Popen(router, pass_fds=devices, preexec_fn=_die_with_parent)
        except BaseException:
            self.close()
            raise
        finally:
            for device in devices:
                os.close(device)

    def environment(self, host: str) -> dict[str, str]:
        """For a process that lives there."""
        return {NAMESPACE: self._namespace(host)}

    def inside(self, host: str, make: Callable[[], T]) -> T:
        """Make a socket, or the like, that is there; in this process."""
        return _inside(self._namespace(host), make)

    def close(self) -> None:
        """Every process in it should be gone."""
        for process in (*self._holders.values(), *([self._router] if self._router is not None else [])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait(10)

    def _namespace(self, host: str) -> str:
        return f"/proc/{self._holders[host].pid}/ns/net"

    def _ip(self, host: str, arguments: str) -> None:
        enter = ["nsenter", f"--net={self._namespace(host)}", "ip", *arguments.split()]
        done = subprocess.run(enter, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {arguments}: {done.stderr}"


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _hold() -> "subprocess.Popen[bytes]":
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=_die_with_parent)
    deadline_s = time.monotonic() + 10.0
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < deadline_s, "no namespace was made"
        assert holder.poll() is None, "namespaces may not be made"
        time.sleep(0.01)
    return holder


def _inside(namespace: str, make: Callable[[], T]) -> T:
    """Make something on a thread that is in a namespace; sockets and devices stay there."""
    made: list[T] = []

    def enter() -> None:
        with open(namespace) as entrance:
            assert _libc.setns(entrance.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        made.append(make())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10.0)
    assert made, f"nothing was made in {namespace}"
    return made[0]


def _device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return device


# -- the router, a program of its own -------------------------------------------------------------------------


class Nat:
    """The memory of one host's NAT: as most do, it lets in answers of those that were called, and no one else."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._inside = {int(port): own for port, own in host.mapped.items()}
        self._outside = {own: port for port, own in self._inside.items()}
        self._called: set[tuple[int, str, int]] = set()

    def going(self, port: int, to: tuple[str, int]) -> int:
        """The port that the world sees of the host's own."""
        if not self.host.is_behind_nat:
            return port
        outside = self._outside.setdefault(port, _FIRST_PORT + len(self._outside))
        self._inside[outside] = port
        self._called.add((outside, *to))
        return outside

    def coming(self, port: int, source: tuple[str, int]) -> int | None:
        """The host's own port that a packet is for; None: for nobody."""
        if not self.host.is_behind_nat:
            return port
        is_let_in = str(port) in self.host.mapped or (port, *source) in self._called
        return self._inside.get(port) if is_let_in else None


def translated(packet: bytearray, source: tuple[str, int], to: tuple[str, int]) -> None:
    """Write other addresses and ports into a TCP packet, and what they change of its check sums (RFC 1624)."""
    start = 4 * (packet[0] & 15)
    before = packet[12:20] + packet[start : start + 4]
    ports = struct.pack("!HH", source[1], to[1])
    hosts = bytes(map(int, f"{source[0]}.{to[0]}".split(".")))
    packet[12:20], packet[start : start + 4] = hosts, ports
    for at, old, new in ((10, before[:8], hosts), (start + 16, before, hosts + ports)):
        total = ~int.from_bytes(packet[at : at + 2]) & 0xFFFF
        total += sum(~word & 0xFFFF for (word,) in struct.iter_unpack("!H", old))
        total += sum(word for (word,) in struct.iter_unpack("!H", new))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        packet[at : at + 2] = (~total & 0xFFFF).to_bytes(2)


def route(hosts: list[Host], devices: list[int], delay_s: float, lost: float) -> None:
    """Pass packets on for ever."""
    nats, places = [Nat(host) for host in hosts], {host.public: number for number, host in enumerate(hosts)}
    chance, held = random.Random(0), list[tuple[float, int, int, bytes]]()
    selector, count = selectors.DefaultSelector(), 0
    for number, device in enumerate(devices):
        selector.register(device, selectors.EVENT_READ, number)
    while True:
        for key, _ in selector.select(max(0.0, held[0][0] - time.monotonic()) if held else None):
            for packet in _read(devices[key.data]):
                end = _through(packet, key.data, nats, places)
                if end is not None and chance.random() >= lost:
                    count += 1
                    heapq.heappush(held, (time.monotonic() + delay_s, count, end, bytes(packet)))
        while held and held[0][0] <= time.monotonic():
            _, _, end, whole = heapq.heappop(held)
            with contextlib.suppress(OSError):  # its queue is full, or the host is gone
                os.write(devices[end], whole)


def _read(device: int) -> list[bytearray]:
    found: list[bytearray] = []
    with contextlib.suppress(BlockingIOError):
        while len(found) < 64:
            found.append(bytearray(os.read(device, _PACKET_BYTES)))
    return found


def _through(packet: bytearray, number: int, nats: list[Nat], places: Mapping[str, int]) -> int | None:
    """Translate a packet of a host; to whom it goes, if to anybody."""
    if packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    start = 4 * (packet[0] & 15)
    port, to_port = struct.unpack_from("!HH", packet, start)
    to = ".".join(map(str, packet[16:20])), to_port
    end = places.get(to[0])
    if end is None or end == number:
        return None
    source = nats[number].host.public, nats[number].going(port, to)
    inside = nats[end].coming(to_port, source)
    if inside is None:
        return None
    translated(packet, source, (nats[end].host.own, inside))
    return end


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    route([Host(**each) for each in given["hosts"]], list(map(int, sys.argv[2:])), given["delay_s"], given["lost"])
