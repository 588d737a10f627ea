"""Throughput of TCP over a far line that loses packets, by congestion control and number of streams.

    python -m benchmarks.far_line [--delay 0.04] [--lost 0.01] [--seconds 8]

As root, on Linux: two hosts in network namespaces, joined by a router in user space that forwards about 10
MB/s. ``--delay`` is one way, in seconds. Rates are MB/s received; the last line is JSON.
"""

import argparse
import json
import socket
import subprocess
import sys
import threading
import time

from tests.scenarios.nat import Host, Hosts
from tests.scenarios.network import NAMESPACE
from varuna.process.far_lines import suit_far_line

PORT, HERE, THERE = 5000, "10.79.0.1", "10.79.0.2"
PIECE = bytes(2**14)
USUAL = b"cubic"
CASES = [("usual", 1), ("usual", 4), ("usual", 8), ("as Varuna sets it", 1), ("as Varuna sets it", 4)]


def take(streams: int) -> None:
    """Accept streams, and print the rate at which they arrived until the last one ended."""
    came = [0] * streams

    def drain(number: int, stream: socket.socket) -> None:
        with stream:
            while got := stream.recv(2**18):
                came[number] += len(got)

    with socket.create_server((HERE, PORT)) as listener:
        print("listening", flush=True)
        readers = [threading.Thread(target=drain, args=(k, listener.accept()[0])) for k in range(streams)]
        begin_s = time.monotonic()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    print(sum(came) / 1e6 / (time.monotonic() - begin_s), flush=True)


def give(control: str, streams: int, seconds: float) -> None:
    """Send over all streams for that long."""

    def send() -> None:
        with socket.socket() as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, USUAL)
            stream.connect((HERE, PORT))
            if control != "usual":
                suit_far_line(stream)
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                stream.sendall(PIECE)

    senders = [threading.Thread(target=send) for _ in range(streams)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


def measured(hosts: Hosts, control: str, streams: int, seconds: float) -> float:
    """Measure MB/s from one host to the other."""

    def command(host: str, *words: str) -> list[str]:
        entered = ["nsenter", f"--net={hosts.environment(host)[NAMESPACE]}", sys.executable]
        return [*entered, "-m", "benchmarks.far_line", *words]

    with subprocess.Popen(command("here", "--take", str(streams)), stdout=subprocess.PIPE, text=True) as taking:
        assert taking.stdout is not None
        assert taking.stdout.readline() == "listening\n"
        giving = command("there", "--give", control, str(streams), "--seconds", str(seconds))
        subprocess.run(giving, check=True, timeout=10 * seconds + 60)
        return float(taking.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.04)
    parser.add_argument("--lost", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--take", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--give", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.take:
        take(given.take)
        return
    if given.give:
        give(given.give[0], int(given.give[1]), given.seconds)
        return
    hosts, found = Hosts({"here": Host(HERE), "there": Host(THERE)}, delay_s=given.delay, lost=given.lost), []
    try:
        for control, streams in CASES:
            rate = measured(hosts, control, streams, given.seconds)
            print(f"{control:20} {streams} streams {rate:8.2f} MB/s", flush=True)
            found.append({"control": control, "streams": streams, "mb_per_s": round(rate, 2)})
    finally:
        hosts.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
