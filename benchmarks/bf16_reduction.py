"""Sums over replicas with `reduction="bf16"`, in fp32, and in fp32 by Gloo, over narrow lines.

    python -m benchmarks.bf16_reduction [--replicas 2] [--line 100] [--numbers 2000000] [--rounds 7]

Every replica lives on a host of its own, a network namespace whose line `tc` makes so narrow in both directions, and is
ready 30 ms after the one before it. The sides take turns; figures are medians of the last replica. The last line is
JSON. Needs root, ip, tc, unshare and nsenter.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.emulated.hosts import Hosts
from tests.scenarios.network import why_not
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, c10d, connect_store, prefixed

LATER_S = 0.03
LIMIT_S = 300.0


def replica(rank: int, size: int, numbers: int, rounds: int) -> None:
    """Take part in all sums; the last one prints medians."""
    torch.set_num_threads(1)
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosts=rank == 0)
    host = os.environ["VARUNA_INTERFACE"]
    ours = Group(store, "ours", rank, size, Endpoint(host))
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=LIMIT_S)
    theirs = c10d.ProcessGroupGloo(prefixed("theirs", store), rank, size, options)
    sides: dict[str, Callable[[Tensor], object]] = {
        "bf16": partial(ours.all_reduce, crossing=torch.bfloat16),
        "fp32": ours.all_reduce,
        "fp32, Gloo's": lambda values: theirs.allreduce([values]).wait(),
    }
    given = torch.randn(numbers, generator=torch.Generator().manual_seed(rank))
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, add_up in sides.items():
            values = given.clone()
            ours.all_reduce(torch.zeros(1))
            time.sleep(rank * LATER_S)
            begin_s = time.monotonic()
            add_up(values)
            times_s[side].append(time.monotonic() - begin_s)
    if rank == size - 1:
        print(json.dumps({side: round(median(found), 3) for side, found in times_s.items()}), flush=True)
    ours.all_reduce(torch.zeros(1))
    os._exit(0)  # the groups' threads would take long to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--line", type=float, default=100, metavar="MBIT", help="of every host, in each direction")
    parser.add_argument("--numbers", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        replica(options.rank, options.replicas, options.numbers, options.rounds)
    if reason := why_not("tc"):
        raise SystemExit(reason)
    with closing(Hosts(options.replicas, 1, options.line * 1e6)) as hosts:
        hosts.run("benchmarks.bf16_reduction", sys.argv[1:], options.replicas, LIMIT_S)


if __name__ == "__main__":
    main()
