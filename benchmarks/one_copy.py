"""Measure losses of machines where each section has one holder: 3 stages on 3 machines, lines of 1 Gb/s.

Machines are network namespaces of this one, whose lines `tc` makes narrow. The cable of each of the three is cut once,
for good, and a fourth machine takes its place. Steps sleep most of the time, and there is no `checkpoints=`.

    sudo python benchmarks/one_copy.py [--megabits 1000] [--width 512] [--settle 30]

The last line is JSON: for each loss the steps that were done again, their seconds, and how long training stood still.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import varuna  # noqa: E402
from benchmarks.accuracy_job import Layer  # noqa: E402
from benchmarks.emulated.chain import Chain, Rows  # noqa: E402
from tests.scenarios.cluster import Cluster  # noqa: E402
from tests.scenarios.network import Network, why_not  # noqa: E402
from tests.waiting import wait_for  # noqa: E402

STAGES, SECTIONS, MICRO_BATCHES = 3, 6, 8
BOUND_S = 120.0


def train(width: int) -> None:
    """The job: layers with weights, each followed by a sleep."""
    trainer = varuna.Trainer(
        lambda: Chain(nn.Sequential(nn.Linear(width, width), Layer(width)) for _ in range(SECTIONS)),
        Rows(width),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4),
        MICRO_BATCHES,
        micro_batch=1,
        cut=[f"layers.{number}" for number in range(1, SECTIONS)],
    )
    for _ in trainer.steps(100_000):
        pass


def usual_s(cluster: Cluster) -> float:
    """Median seconds of the newest steps."""
    seen: list[float] = []
    for _ in range(12):
        step = max(cluster.steps())
        cluster.until_step(step + 1, BOUND_S)
        seen.append(time.monotonic())
    return statistics.median(b - a for a, b in itertools.pairwise(seen))


def lost(cluster: Cluster, network: Network, machine: str, cut: set[str]) -> dict[str, Any]:
    """Cut a machine's cable, and wait until training goes on without it."""
    step_s, before = usual_s(cluster), cluster.events("generation_started")[-1].record
    cut.add(machine)
    begin_s = time.monotonic()
    network.part(cut)
    newest = max(cluster.steps())

    def goes_on() -> bool:
        nonlocal newest
        record = cluster.events("generation_started")[-1].record
        if record.generation == before.generation:
            newest = max(cluster.steps())
            return False
        return max(cluster.steps()) > newest and cluster.events("step_recorded")[-1].generation >= record.generation

    wait_for(goes_on, BOUND_S)
    steps = [event for event in cluster.events("step_recorded") if event.generation > before.generation]
    again = newest + 1 - steps[0].step
    return {
        "machine": machine,
        "step_s": round(step_s, 3),
        "steps_again": again,
        "again_s": round(again * step_s, 2),
        "until_a_new_step_s": round(time.monotonic() - begin_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=1000.0, help="of each machine's line, in a second")
    parser.add_argument("--width", type=int, default=512, help="of the layers; 12 bytes of state for each weight")
    parser.add_argument("--settle", type=int, default=30, help="steps before each loss")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train(options.width)
        return
    if reason := why_not("tc"):
        sys.exit(f"benchmarks/one_copy.py needs hosts of its own: {reason}")
    network = Network("manager", *"abcdef")
    network.shape(options.megabits * 1e6)
    where = ("--host", "0.0.0.0", "--advertise", network.addresses["manager"])
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder), "--workers", "3", "--stages", str(STAGES), *where, whereabouts=network.environment
        )
        try:
            joined, found, cut = "", list[dict[str, Any]](), set[str]()
            for name in "abcdef":
                cluster.until_agents(len(joined))
                cluster.agent(name, "--job", "--width", str(options.width), script=__file__)
                joined += name
                if len(joined) > STAGES:
                    cluster.until_step(max(cluster.steps(), default=0) + options.settle, BOUND_S)
                    found.append(lost(cluster, network, joined[len(found)], cut))
                    print(found[-1], file=sys.stderr)
            copies = cluster.events("generation_started")[-1].record.plan.copies
            print(json.dumps({"copies": copies, "megabits_per_s": options.megabits, "losses": found}))
        except BaseException:
            print(cluster.said()[-4000:], file=sys.stderr)
            raise
        finally:
            cluster.close()
            network.close()


if __name__ == "__main__":
    main()
