"""Sums over replicas with `reduction="bf16"`, with the same by Gloo's own collectives, and in fp32, over narrow lines.

    python -m benchmarks.bf16_reduction [--replicas 2] [--line 100] [--numbers 2000000] [--rounds 7]

Every replica lives on a host of its own, a network namespace whose line `tc` makes so narrow in both directions, and is
ready 30 ms after the one before it. The sides take turns; figures are medians of the last replica. Gloo's collectives
send before they ask for what comes. Both ways in bf16 give the same bits, which is checked. The last line is JSON.
Needs root, ip, tc, unshare and nsenter.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from statistics import median

import torch
from torch import Tensor

from benchmarks.emulated.hosts import Hosts
from tests.scenarios.network import why_not
from varuna.engine.base.transport import OPERATION_BOUND_S, Group, c10d, connect_store
from varuna.engine.links.bf16_all_reduce import all_reduce_rounded

LATER_S = 0.03
LIMIT_S = 300.0


class GloosOwn(Group):
    """The same exchanges as Gloo makes them."""

    def exchange(self, values: Tensor, bound_s: float = OPERATION_BOUND_S) -> Tensor:
        theirs = torch.empty_like(values)
        whole, parts = theirs.view(torch.uint8), values.view(torch.uint8)
        self._group.alltoall_base(whole, parts, [], [], c10d.AllToAllOptions()).wait()
        return theirs

    def gather(self, part: Tensor) -> Tensor:
        whole = torch.empty(self.size * part.numel(), dtype=part.dtype)
        places = list(whole.view(torch.uint8).chunk(self.size))
        self._group.allgather([places], [part.view(torch.uint8)], c10d.distributed_c10d.AllgatherOptions()).wait()
        return whole


def replica(rank: int, size: int, numbers: int, rounds: int) -> None:
    """Take part in all sums; the last one prints medians."""
    torch.set_num_threads(1)
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosts=rank == 0)
    host = os.environ["VARUNA_INTERFACE"]
    ours, theirs = Group(store, "ours", rank, size, host), GloosOwn(store, "theirs", rank, size, host)
    sides: dict[str, Callable[[Tensor], None]] = {
        "bf16": lambda values: all_reduce_rounded(ours, values),
        "bf16, Gloo's own": lambda values: all_reduce_rounded(theirs, values),
        "fp32": ours.all_reduce,
    }
    given = torch.randn(numbers, generator=torch.Generator().manual_seed(rank))
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        sums = []
        for side, add_up in sides.items():
            values = given.clone()
            ours.all_reduce(torch.zeros(1))
            time.sleep(rank * LATER_S)
            begin_s = time.monotonic()
            add_up(values)
            times_s[side].append(time.monotonic() - begin_s)
            sums.append(values)
        assert torch.equal(sums[0], sums[1]), "both ways in bf16 give the same bits"
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
