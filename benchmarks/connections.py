"""Messages and sums between processes of one machine, by our connections and by Gloo.

    python -m benchmarks.connections [--members 2] [--rounds 5]

The two sides take turns; figures are medians of the rounds, in microseconds: one way of a message that is answered, and
a sum over all members. The last line is JSON.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, c10d, connect_store, prefixed

HOST = "127.0.0.1"
MESSAGES_BYTES = {64: 500, 65_536: 300, 1_048_576: 60, 67_108_864: 4}
"""Sizes of messages, and how often each is sent in a round."""
SUMS = {16: 150, 262_144: 15, 16_777_216: 2}
"""Numbers (fp32), and how often they are added up in a round."""


def member(rank: int, size: int, port: int, rounds: int) -> None:
    """Take part; the first one prints medians."""
    torch.set_num_threads(1)
    store = connect_store(HOST, port)
    ours = Group(store, "ours", rank, size, Endpoint(HOST))
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=60)
    gloo = c10d.ProcessGroupGloo(prefixed("gloo", store), rank, size, options)
    peer = 1 - rank

    def by_ours(buffer: Tensor) -> None:
        for sends in (rank == 0, rank == 1):
            (ours.send if sends else ours.receive)(buffer, peer, 1).wait()

    def by_gloo(buffer: Tensor) -> None:
        for sends in (rank == 0, rank == 1):
            (gloo.send if sends else gloo.recv)([buffer], peer, 1).wait()

    sides: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object]]] = {
        "ours": (by_ours, ours.all_reduce),
        "gloo": (by_gloo, lambda values: gloo.allreduce([values]).wait()),
    }
    times_s: dict[str, list[float]] = {}
    for _ in range(rounds):
        for side, (swap, add_up) in sides.items():
            work = [(f"message of {size_bytes:,} B", swap, torch.zeros(size_bytes, dtype=torch.uint8), often, 2)
                    for size_bytes, often in MESSAGES_BYTES.items() if size == 2]  # fmt: skip
            work += [(f"sum of {numbers:,}", add_up, torch.zeros(numbers), often, 1) for numbers, often in SUMS.items()]
            for what, run, values, often, trips in work:
                run(values)
                begin_s = time.perf_counter()
                for _ in range(often):
                    run(values)
                each_s = (time.perf_counter() - begin_s) / often / trips
                times_s.setdefault(f"{what}, {side}", []).append(each_s)
    if rank == 0:
        print(json.dumps({what: round(1e6 * median(found), 1) for what, found in times_s.items()}), flush=True)
    ours.all_reduce(torch.zeros(1))
    os._exit(0)  # Gloo's threads would take long to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    store = connect_store(HOST, 0, hosts=True)
    start_processes(  # type: ignore[no-untyped-call]
        member, (options.members, store.port, options.rounds), nprocs=options.members, start_method="spawn"
    )


if __name__ == "__main__":
    main()
