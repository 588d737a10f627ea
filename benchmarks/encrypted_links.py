"""Measure the cost of WireGuard between two hosts: one run over plain links and over encrypted ones, side by side.

    python benchmarks/encrypted_links.py [--megabits 0 1000 100] [--rounds 3] [--steps 30]

Needs root, ``ip``, and ``wg-quick`` with the kernel's WireGuard or ``wireguard-go`` (Debian: wireguard-tools,
wireguard-go). Two network namespaces stand for two hosts; the cable between them is shaped by ``tc tbf`` on both ends
(0: not at all). Each host runs an agent, the first one the manager too, and `examples/gpt2_text` trains as two stages.
Configurations come from `examples/wireguard/mesh.py`, as a user would write them. Printed: throughput of one TCP
stream, and the median step, encrypted over plain within each round. Losses must be equal.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MESH = ROOT / "examples" / "wireguard" / "mesh.py"
TRAIN = ROOT / "examples" / "gpt2_text" / "train.py"
OUTSIDE = ("192.0.2.1", "192.0.2.2")
INSIDE = ("10.77.0.1", "10.77.0.2")
PORT = 7070
_BOUND_S = 300
_STREAM_BYTES = 256 << 20
_SKIPPED_STEPS = 5

_SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7071))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
"""
_SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7071))
block, left = bytes(1 << 20), int(sys.argv[2])
begin_s = time.monotonic()
while left > 0:
    connection.sendall(block)
    left -= len(block)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - begin_s)
"""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    namespace: str

    def command(self, *words: str) -> list[str]:
        """``words``, to be run on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, *words: str) -> str:
        """Run to the end; its output."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=60).stdout


def ip(*words: str) -> None:
    """One ``ip`` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


@contextlib.contextmanager
def two_hosts(folder: Path, megabits: int) -> Iterator[tuple[Host, Host]]:
    """Two namespaces, a cable between them, and WireGuard over it."""
    hosts = (Host(f"varuna-a-{os.getpid()}"), Host(f"varuna-b-{os.getpid()}"))
    cables = (f"va{os.getpid()}", f"vb{os.getpid()}")
    named = [f"wg{letter}={address}" for letter, address in zip("ab", OUTSIDE, strict=True)]
    subprocess.run([sys.executable, MESH, "--out", folder, *named], check=True, capture_output=True)
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable, address in zip(hosts, cables, OUTSIDE, strict=True):
            ip("link", "set", cable, "netns", host.namespace)
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "addr", "add", f"{address}/24", "dev", cable)
            host.run("ip", "link", "set", cable, "up")
            if megabits:
                shape = ("rate", f"{megabits}mbit", "burst", "128kb", "latency", "200ms")
                host.run("tc", "qdisc", "add", "dev", cable, "root", "tbf", *shape)
        for host, letter in zip(hosts, "ab", strict=True):
            host.run("wg-quick", "up", str(folder / f"wg{letter}.conf"))
        yield hosts
    finally:
        for host, letter in zip(hosts, "ab", strict=True):
            subprocess.run(host.command("wg-quick", "down", str(folder / f"wg{letter}.conf")), capture_output=True)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def stream_megabits(hosts: tuple[Host, Host], address: str, megabits: int) -> float:
    """Throughput of one TCP stream from the first host to ``address`` on the second, in Mb/s."""
    size = min(_STREAM_BYTES, megabits * 1_000_000) if megabits else _STREAM_BYTES  # at most some 8 s of a shaped cable
    server = subprocess.Popen(hosts[1].command(sys.executable, "-c", _SERVE, address), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        seconds = float(hosts[0].run(sys.executable, "-c", _SEND, address, str(size)))
    finally:
        server.kill()
        server.wait()
    return size * 8 / seconds / 1e6


def train(hosts: tuple[Host, Host], folder: Path, addresses: tuple[str, str], steps: int) -> tuple[float, list[float]]:
    """Median seconds of a step, and all losses, of a run as two stages on the two hosts."""
    environment = {**os.environ, "VARUNA_STAGES": "2", "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    varuna = [sys.executable, "-m", "varuna.cli.main"]
    log, out = folder / "log.jsonl", folder / "manager.out"
    processes: list[subprocess.Popen[bytes]] = []

    def start(host: Host, name: str, *words: str) -> None:
        with (folder / f"{name}.out").open("wb") as stdout, (folder / f"{name}.err").open("wb") as stderr:
            command = host.command(*varuna, *words)
            processes.append(
                subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
            )

    try:
        where = ("--host", addresses[0], "--port", str(PORT), "--run-dir", str(folder / "run"), "--workers", "2")
        start(hosts[0], "manager", "manager", *where, "--json-log", str(log))
        deadline_s = time.monotonic() + _BOUND_S
        while "JOIN" not in out.read_text():
            _check(deadline_s, "the manager's JOIN string", folder)
        joins = [out.read_text().split("JOIN ")[1].split()[0]]
        token = hosts[0].command(*varuna, "join-token", "--run", str(folder / "run"))
        joins.append(subprocess.run(token, env=environment, check=True, capture_output=True, text=True).stdout.strip())
        for host, join, address in zip(hosts, joins, addresses, strict=True):
            job = (str(TRAIN), "--steps", str(steps), "--global-batch", "16")
            start(host, f"agent-{address}", "agent", join, "--interface", address, "--", *job)
        while processes[0].poll() is None:
            _check(deadline_s, "the end of the run", folder)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    times = [row["wall_time"] for row in rows]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return statistics.median(gaps[_SKIPPED_STEPS:]), [row["loss"] for row in rows]


def _check(deadline_s: float, what: str, folder: Path) -> None:
    if time.monotonic() > deadline_s:
        said = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.err"))
        raise SystemExit(f"waited {_BOUND_S} s for {what}\n{said}")
    time.sleep(0.2)


def measure(megabits: int, rounds: int, steps: int) -> None:
    """Print one cable's rows."""
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with two_hosts(folder, megabits) as hosts:
            plain, encrypted = (stream_megabits(hosts, ends[1], megabits) for ends in (OUTSIDE, INSIDE))
            cable = f"{megabits} Mb/s" if megabits else "not shaped"
            print(f"cable {cable}: one stream {plain:.0f} Mb/s plain, {encrypted:.0f} Mb/s encrypted", flush=True)
            for index in range(rounds):
                found = []
                for ends in (OUTSIDE, INSIDE):
                    place = folder / f"{index}-{ends[0]}"
                    place.mkdir()
                    found.append(train(hosts, place, ends, steps))
                (plain_s, losses), (encrypted_s, same) = found
                assert losses == same, "the losses differ"
                ratios.append(encrypted_s / plain_s)
                print(f"  step {plain_s * 1e3:.0f} ms plain, {encrypted_s * 1e3:.0f} ms encrypted", flush=True)
    print(f"  encrypted / plain: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    """Measure each cable."""
    parser = argparse.ArgumentParser(description="What WireGuard between two hosts costs a run.")
    parser.add_argument("--megabits", type=int, nargs="+", default=[0, 1000, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    missing = [tool for tool in ("ip", "tc", "wg-quick") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise SystemExit(f"needs root and {', '.join(missing or ['nothing else'])}")
    for megabits in args.megabits:
        measure(megabits, args.rounds, args.steps)


if __name__ == "__main__":
    main()
