"""Hosts with cables between them on this machine: network namespaces of this process's own, joined by bridges.

Nothing outlives the processes that hold the namespaces, which die with this one, and the machine's own network is not
touched. It takes root, or its capabilities; where they are missing, ``why_not`` says so.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable

SUBNET = "10.77.0"
NAMESPACE = "NETWORK_NAMESPACE"
"""In the environment of a process that ``warm`` starts: the namespace in which it lives."""

_PR_SET_PDEATHSIG = 1
_NOBODY = "02:00:00:00:00:77"
_START_S = 10.0
_SHAPED = "burst 16kb latency 400ms"
"""The bucket is small: what passes a line that was idle at full speed hides how narrow it is."""
_UNCUT_BYTES = 15_000
"""Bytes that TCP hands over at once and that pass the bucket whole; a real network card cuts them. Cut at the bucket, a
packet has its own timer: at 100 Mb/s that takes a fifth of two processors that compute, at 1 Gb/s two fifths."""
_USUAL = "cubic"
"""Linux's default for TCP congestion control; this machine may be set to another."""
_prctl = ctypes.CDLL(None).prctl  # a child that was forked from threads may not look it up


_TRIED = {"nft": "nft add table inet t", "tc": f"tc qdisc add dev eth0 root tbf rate 1mbit {_SHAPED}"}


def why_not(needs: str = "nft") -> str:
    """Say why there can be no such network here, or return "". ``needs``: nft to drop packets, tc to shape lines."""
    missing = [tool for tool in ("ip", needs, "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} on this machine"
    make = "ip link add near type bridge && ip link add to-a type veth peer name eth0"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{make} && {_TRIED[needs]}"], capture_output=True, text=True, check=False
    )
    return "" if tried.returncode == 0 else f"network namespaces cannot be made here: {tried.stderr.strip()[:200]}"


class Network:
    """``hosts`` by name, with addresses in the order in which they are named: 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, *hosts: str) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._dropping: set[str] = set()
        self.addresses = {host: f"{SUBNET}.{number}" for number, host in enumerate(hosts, 1)}
        try:
            for name in ("", *hosts):  # the nameless one is the switch
                self._holders[name] = self._hold()
            for bridge in ("near", "far"):
                self._ip("", f"link add {bridge} type bridge")
                self._ip("", f"link set {bridge} up")
            for host, address in self.addresses.items():
                pid = self._holders[host].pid
                self._ip("", f"link add to-{host} type veth peer name eth0 netns {pid}")
                self._ip("", f"link set to-{host} master near up")
                self._ip(host, f"address add {address}/24 dev eth0")
                self._ip(host, "link set eth0 up")
                self._ip(host, "link set lo up")
        except BaseException:
            self.close()
            raise

    def environment(self, host: str) -> dict[str, str]:
        """For a process that lives there."""
        return {NAMESPACE: f"/proc/{self._holders[host].pid}/ns/net"}

    def shape(self, bits_per_s: float) -> None:
        """Every host's line carries so many bits a second, in each direction."""
        for host, address in self.addresses.items():
            self._ip(host, f"route replace {SUBNET}.0/24 dev eth0 congctl {_USUAL}")
            self._ip(host, f"route replace local {address} dev eth0 table local src {address} congctl {_USUAL}")
            for where, device in ((host, "eth0"), ("", f"to-{host}")):
                self._ip(where, f"link set {device} gso_max_size {_UNCUT_BYTES}")
            self.narrow(host, bits_per_s)

    def narrow(self, host: str, bits_per_s: float) -> None:
        """Limit one host's line to ``bits_per_s``, in each direction."""
        for where, device in ((host, "eth0"), ("", f"to-{host}")):
            shaped = f"qdisc replace dev {device} root tbf rate {bits_per_s:.0f}bit {_SHAPED}"
            self._inside(where, ["tc", *shaped.split()])

    def widen(self, host: str) -> None:
        """Take the limit of a host's line away."""
        for where, device in ((host, "eth0"), ("", f"to-{host}")):
            self._inside(where, ["tc", "qdisc", "delete", "dev", device, "root"])

    def keep_pace(self) -> None:
        """TCP does not begin slowly after pauses, as it does by default."""
        for host in self.addresses:
            self._inside(host, ["sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"])

    def part(self, far: Iterable[str]) -> None:
        """These hosts reach each other and nobody else; packets vanish, as they do when a cable is out."""
        far = set(far)
        for host in self.addresses:
            self._ip("", f"link set to-{host} master {'far' if host in far else 'near'}")

    def heal(self) -> None:
        """All cables are in, and nothing is dropped."""
        self.part(())
        for host in self._dropping:
            self._nft(host, "flush ruleset")
        self._dropping.clear()

    def drop(self, at: str, source: str, percent: int = 100) -> None:
        """Of the packets that reach ``at`` from ``source``, so many are lost, at random; the other way none is."""
        self._dropping.add(at)
        self._nft(at, "add table inet faults")
        self._nft(at, "add chain inet faults input { type filter hook input priority 0; }")
        lost = f"numgen random mod 100 < {percent} " if percent < 100 else ""
        self._nft(at, f"add rule inet faults input ip saddr {self.addresses[source]} {lost}drop")

    def silence(self, one: str, other: str) -> None:
        """Drop all that two hosts send to each other: each sends to a card that does not exist."""
        for host, peer in ((one, other), (other, one)):
            self._ip(host, f"neighbour replace {self.addresses[peer]} lladdr {_NOBODY} dev eth0 nud permanent")

    def unsilence(self, one: str, other: str) -> None:
        """Let two hosts reach each other again."""
        for host, peer in ((one, other), (other, one)):
            self._ip(host, f"neighbour delete {self.addresses[peer]} dev eth0")

    def close(self) -> None:
        """Every process in it should be gone."""
        for holder in self._holders.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGKILL)
            holder.wait(10)

    def _hold(self) -> "subprocess.Popen[bytes]":
        holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        )
        deadline_s = time.monotonic() + _START_S
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline_s, "no namespace was made"
            time.sleep(0.01)
        return holder

    def _ip(self, host: str, arguments: str) -> None:
        self._inside(host, ["ip", *arguments.split()])

    def _nft(self, host: str, arguments: str) -> None:
        self._inside(host, ["nft", *arguments.split()])

    def _inside(self, host: str, command: list[str]) -> None:
        enter = ["nsenter", "--target", str(self._holders[host].pid), "--net"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
