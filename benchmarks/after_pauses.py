"""Measure the cost of a pause to a message on a far line: the kernel's TCP between two hosts, over a line with a delay.

    python benchmarks/after_pauses.py [--mbits 400] [--round-trip-s 0.06] [--mb 4] [--json]

Hosts are network namespaces, joined by a line of this process's own, which delays each packet (of 9,000 bytes) and
lets no more than its rate pass, each way. Messages follow pauses of several lengths, where Linux begins slowly after a
pause, as it does by default, and where it does not (net.ipv4.tcp_slow_start_after_idle). Needs root, ip, unshare,
nsenter and /dev/net/tun. The last line is JSON.
"""

import argparse
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.emulated.wires import move_to  # noqa: E402
from tests.scenarios.network import NAMESPACE, Network, why_not  # noqa: E402
from varuna.extras.doctor.judging.facts import LinkFacts  # noqa: E402
from varuna.extras.doctor.judging.pauses import lost_s  # noqa: E402

PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
ROUNDS, WARM_MESSAGES = 3, 6
ADDRESSES = {"near": "10.78.0.1", "far": "10.78.0.2"}
PACKET_BYTES, FIRST_PACKETS = 9000, 10
"""A larger packet than usual: this process carries each one."""
_SET_INTERFACE, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000


@contextmanager
def living_at(network: Network, host: str) -> Iterator[None]:
    """Move this thread to that host for a while: what it opens then belongs there."""
    with open("/proc/thread-self/ns/net", "rb") as here, open(network.environment(host)[NAMESPACE], "rb") as there:
        move_to(there)
        try:
            yield
        finally:
            move_to(here)


def plug(network: Network, host: str) -> int:
    """One end of the line; returns a descriptor of its packets."""
    with living_at(network, host):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH", b"far0", _TAP | _NO_HEADER))
        for command in (
            f"ip address add {ADDRESSES[host]}/24 dev far0",
            f"ip link set far0 mtu {PACKET_BYTES} txqueuelen 5000 up",
            "ip route replace 10.78.0.0/24 dev far0 congctl cubic",
        ):
            subprocess.run(command.split(), check=True)
    return end


class FarLine(threading.Thread):
    """Carries packets from each end to the other one, late and not faster than its rate."""

    def __init__(self, ends: tuple[int, int], *, bytes_per_s: float, delay_s: float) -> None:
        super().__init__(daemon=True)
        self._to = dict(zip(ends, reversed(ends), strict=True))
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._is_open = True

    def run(self) -> None:
        """Until it is closed."""
        due: list[tuple[float, int, int, bytes]] = []
        free_s, number = dict.fromkeys(self._to, 0.0), 0
        while self._is_open:
            while due and due[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(due)
                os.write(end, packet)
            wait_s = max(0.0, min(0.05, due[0][0] - time.monotonic())) if due else 0.05
            for end in select.select(list(self._to), [], [], wait_s)[0]:
                packet, now_s = os.read(end, 2 * PACKET_BYTES), time.monotonic()
                free_s[end] = max(free_s[end], now_s) + len(packet) / self._bytes_per_s
                number += 1
                heapq.heappush(due, (free_s[end] + self._delay_s, number, self._to[end], packet))

    def close(self) -> None:
        """Carry nothing any more."""
        self._is_open = False
        self.join(10)


def answer(listening: socket.socket, size_bytes: int) -> None:
    """Say one byte whenever a message is here, until there are no more."""
    connection, _ = listening.accept()
    room, missing = bytearray(1 << 20), size_bytes
    while got := connection.recv_into(room, min(len(room), missing)):
        missing -= got
        if not missing:
            connection.sendall(b"x")
            missing = size_bytes


def times_s(*, begins_slowly: bool, bytes_per_s: float, delay_s: float, size_bytes: int) -> dict[float, float]:
    """By length of the pause before it: how long a message takes until its answer is here, the median of some."""
    with closing(Network(*ADDRESSES)) as network:
        if not begins_slowly:
            network.keep_pace()
        near, far = (plug(network, host) for host in ADDRESSES)
        with closing(FarLine((near, far), bytes_per_s=bytes_per_s, delay_s=delay_s)) as line:
            line.start()
            with living_at(network, "far"):
                listening = socket.create_server((ADDRESSES["far"], 5000))
            threading.Thread(target=answer, args=(listening, size_bytes), daemon=True).start()
            with living_at(network, "near"):
                sending = socket.create_connection((ADDRESSES["far"], 5000), timeout=60)
            message, found = bytes(size_bytes), dict[float, list[float]]()
            with sending, listening:
                for pause_s in (*[0.0] * WARM_MESSAGES, *sorted(PAUSES_S * ROUNDS)):
                    time.sleep(pause_s)
                    begin_s = time.monotonic()
                    sending.sendall(message)
                    sending.recv(1)
                    found.setdefault(pause_s, []).append(time.monotonic() - begin_s)
        for end in (near, far):
            os.close(end)
    return {pause_s: median(took_s[-ROUNDS:]) for pause_s, took_s in found.items()}


def main() -> None:
    """Print a row per setting and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", type=float, default=400, help="rate of the line, in Mb/s")
    parser.add_argument("--round-trip-s", type=float, default=0.06, help="delay there and back")
    parser.add_argument("--mb", type=float, default=4, help="size of a message")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    reason = why_not("tc") or ("" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun")
    if reason:
        raise SystemExit(f"skipped: {reason}")
    rate, delay_s = options.mbits * 1e6 / 8, options.round_trip_s / 2
    result: dict[str, object] = vars(options)
    for begins_slowly in (True, False):
        took_s = times_s(
            begins_slowly=begins_slowly, bytes_per_s=rate, delay_s=delay_s, size_bytes=int(options.mb * 1e6)
        )
        name = "begins slowly" if begins_slowly else "goes on as before"
        result[name] = {str(pause_s): round(seconds, 4) for pause_s, seconds in took_s.items()}
        if not options.json:
            shown = "  ".join(f"{pause_s:g} s {1000 * seconds:.0f} ms" for pause_s, seconds in took_s.items())
            print(f"{name:18} after {shown}", flush=True)
    link = LinkFacts(latency_s=delay_s, bytes_per_s=rate)
    estimated_s = lost_s(link, first_bytes=FIRST_PACKETS * (PACKET_BYTES - 52))
    result["estimated_s"] = round(estimated_s, 4)
    if not options.json:
        print(f"what the longest pause costs, by varuna doctor's estimate: {1000 * estimated_s:.0f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
