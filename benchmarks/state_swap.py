"""Two workers that swap sections in a morph, beside one that only sends, over a narrow line.

    python -m benchmarks.state_swap [--line 200] [--megabytes 8] [--rounds 5]

Each worker lives on a host of its own, a network namespace whose line `tc` makes so narrow in both directions. A swap
that uses both directions at once takes as long as one worker's sending alone. The sides take turns; figures are medians
of the worker that is later. The last line is JSON. Needs root, ip, tc, unshare and nsenter.
"""

import argparse
import json
import os
import sys
import time
from contextlib import closing
from statistics import median

import torch

from benchmarks.emulated.hosts import Hosts
from tests.scenarios.network import why_not
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.messages import Transfer
from varuna.engine.base.transport import Group, connect_store
from varuna.engine.worker.state_transfer import exchange

WORKERS, SECTIONS = 2, 4
LATER_S = 0.03
LIMIT_S = 300.0


def worker(rank: int, section_bytes: int, rounds: int) -> None:
    """Take part in all transfers; the later one prints medians."""
    torch.set_num_threads(1)
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosts=rank == 0)
    group = Group(store, "swap", rank, WORKERS, os.environ["VARUNA_INTERFACE"])
    mine = [section for section in range(SECTIONS) if section % WORKERS == rank]
    held = {each: SectionState(each, {"parameters/weight": torch.randn(section_bytes // 4)}) for each in mine}
    swap = [Transfer(section=each, source_rank=each % 2, target_rank=1 - each % 2) for each in range(SECTIONS)]
    sides = {"swap": swap, "one way": [each for each in swap if each.source_rank == 0]}
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, transfers in sides.items():
            group.all_reduce(torch.zeros(1))
            time.sleep(rank * LATER_S)
            begin_s = time.monotonic()
            exchange(group, transfers, rank, held)
            times_s[side].append(time.monotonic() - begin_s)
    if rank == WORKERS - 1:
        found = {side: round(median(each), 3) for side, each in times_s.items()}
        print(f"a swap takes {found['swap'] / found['one way']:.2f} of the time of one way")
        print(json.dumps(found), flush=True)
    group.all_reduce(torch.zeros(1))
    os._exit(0)  # the group's threads would take long to end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--line", type=float, default=200, metavar="MBIT", help="of every host, in each direction")
    parser.add_argument("--megabytes", type=float, default=8, help="of a section; each worker sends two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        worker(options.rank, int(options.megabytes * 1e6), options.rounds)
    if reason := why_not("tc"):
        raise SystemExit(reason)
    with closing(Hosts(WORKERS, 1, options.line * 1e6)) as hosts:
        hosts.run("benchmarks.state_swap", sys.argv[1:], WORKERS, LIMIT_S)


if __name__ == "__main__":
    main()
