"""State that moves in a morph over a narrow line: two workers that swap sections, and optimizer state that follows.

    python -m benchmarks.state_swap [--line 200] [--megabytes 8] [--rounds 5]

Each worker lives on a host of its own, a network namespace whose line `tc` makes so narrow in both directions. A swap
that uses both directions at once takes as long as one worker's sending alone. Sections whose optimizer state follows
can compute after their parameters, and are whole when the rest has come. The sides take turns; figures are medians of
the worker that is later. The last line is JSON. Needs root, ip, tc, unshare and nsenter.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import median

import torch
from torch import Tensor

from benchmarks.emulated.hosts import Hosts
from tests.scenarios.network import why_not
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.messages import Transfer
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.transport import Group, connect_store
from varuna.engine.copies.following import StateReceiver, StateSender
from varuna.engine.stage.load_state import rest_of
from varuna.engine.worker.state_transfer import exchange_states

WORKERS, SECTIONS = 2, 4
LATER_S = 0.03
LIMIT_S = 300.0


def worker(rank: int, section_bytes: int, rounds: int, *, compresses: bool) -> None:
    """Take part in all transfers; the later one prints medians."""
    torch.set_num_threads(1)
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosts=rank == 0)
    group = Group(store, "swap", rank, WORKERS, Endpoint(os.environ["VARUNA_INTERFACE"]), compresses=compresses)
    mine = [section for section in range(SECTIONS) if section % WORKERS == rank]
    held = {each: SectionState(each, _adam(section_bytes // 4)) for each in mine}
    swap = [Transfer(section=each, source_rank=each % 2, target_rank=1 - each % 2) for each in range(SECTIONS)]
    one_way = [each for each in swap if each.source_rank == 0]
    following = [each.model_copy(update={"follows": True}) for each in one_way]
    sides = {"swap": swap, "one way": one_way, "parameters": following}
    times_s: dict[str, list[float]] = {side: [] for side in (*sides, "the rest, too")}
    for _ in range(rounds):
        for side, transfers in sides.items():
            group.all_reduce(torch.zeros(1))
            time.sleep(rank * LATER_S)
            begin_s = time.monotonic()
            exchange_states(group, transfers, rank, held)
            times_s[side].append(time.monotonic() - begin_s)
            if transfers is following:
                follow(group, following, rank, held)
                times_s["the rest, too"].append(time.monotonic() - begin_s)
    if rank == WORKERS - 1:
        found = {side: round(median(each), 3) for side, each in times_s.items()}
        parts = [found[side] / found["one way"] for side in ("swap", "parameters", "the rest, too")]
        print(
            f"of the time of one way, a swap takes {parts[0]:.2f}; a section whose optimizer state follows can compute "
            f"after {parts[1]:.2f}, and is whole after {parts[2]:.2f}"
        )
        print(json.dumps(found), flush=True)
    group.all_reduce(torch.zeros(1))
    os._exit(0)  # the group's threads would take long to end


def _adam(elements: int) -> dict[str, Tensor]:
    names = ("parameters/weight", "optimizer/weight/exp_avg", "optimizer/weight/exp_avg_sq")
    return {name: torch.randn(elements) for name in names}


def follow(group: Group, transfers: Sequence[Transfer], rank: int, held: Mapping[int, SectionState]) -> None:
    """Send or receive what comes after the parameters; returns once it has come."""
    if rank == transfers[0].source_rank:
        done = threading.Event()
        parts = {section: rest_of(state, torch.float32) for section, state in held.items()}
        StateSender(group, transfers, parts, then=done.set, step=0, stage=rank)
        if not done.wait(LIMIT_S):
            raise TimeoutError("optimizer state did not arrive")
    else:
        StateReceiver(group, transfers, lambda rest: None, inbox=Inbox(), step=0, stage=rank).wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--line", type=float, default=200, metavar="MBIT", help="of every host, in each direction")
    parser.add_argument("--megabytes", type=float, default=8, help="of a section's parameters; each worker sends two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compress", action="store_true", help="where that is faster, as a run does")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        worker(options.rank, int(options.megabytes * 1e6), options.rounds, compresses=options.compress)
    if reason := why_not("tc"):
        raise SystemExit(reason)
    with closing(Hosts(WORKERS, 1, options.line * 1e6)) as hosts:
        hosts.run("benchmarks.state_swap", sys.argv[1:], WORKERS, LIMIT_S)


if __name__ == "__main__":
    main()
