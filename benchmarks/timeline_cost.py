"""What it costs to remember the newest steps for `varuna timeline`: steps with it over steps without it, side by side.

Two ranks as threads train a model of two tiny layers with many micro-batches, so that a step is nearly nothing but
actions to remember. In one process, blocks of steps with and without remembering alternate; the CPU time of the main
rank's training thread is compared, since the machine may be busy. That ratio has a noise of some per cent, as blocks
without remembering that are compared with one another show; so the call itself is timed too.

    python -m benchmarks.timeline_cost [--blocks 16] [--steps 8] [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine_overhead import Numbers, two_layers
from varuna.engine.shown.recent_steps import RanStep, RecentSteps
from varuna.testing import run

MICRO_BATCHES = 64
_take = RecentSteps.take


def _forget(recent: RecentSteps, ran: RanStep) -> None:
    """Do without."""


_spent_s: list[float] = []


def _timed(recent: RecentSteps, ran: RanStep) -> None:
    """Remember, and note what that takes."""
    begin_s = time.thread_time()
    _take(recent, ran)
    _spent_s.append(time.thread_time() - begin_s)


MODES: dict[str, Callable[[RecentSteps, RanStep], None]] = {
    "without": _forget,
    "with": _timed,
    "again without": _forget,
}


def _switch(mode: str) -> None:
    setattr(RecentSteps, "take", MODES[mode])  # noqa: B010 - mypy takes no assignment to a method


def measure(blocks: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of each step of the main rank's training thread, by mode."""
    import torch

    import varuna

    found: dict[str, list[float]] = {name: [] for name in MODES}

    def script() -> None:
        trainer = varuna.Trainer(
            two_layers,
            Numbers(),
            lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-3),
            global_batch=MICRO_BATCHES,
            micro_batch=1,
            cut=["other"],
        )
        names, last_s = list(MODES), time.thread_time()
        for step in trainer.steps((blocks + len(names)) * steps):
            now_s = time.thread_time()
            if step.is_main:
                block, within = divmod(step.index, steps)
                if block >= len(names) and within:  # the first round warms up, and the first of a block changes modes
                    found[names[block % len(names)]].append(now_s - last_s)
                if within == steps - 1:
                    _switch(names[(block + 1) % len(names)])
            last_s = time.thread_time()

    _switch("without")
    try:
        run(script, workers=2, stages=2, bound_s=1000.0)
    finally:
        setattr(RecentSteps, "take", _take)  # noqa: B010
    return found


def main() -> None:
    """Print ratios of medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    found = measure(options.blocks, options.steps)
    median_s = {name: statistics.median(seconds) for name, seconds in found.items()}
    told: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES,
        "step_ms": round(1e3 * median_s["without"], 3),
        "with_over_without": round(median_s["with"] / median_s["without"], 4),
        "without_over_without": round(median_s["again without"] / median_s["without"], 4),
        "share_of_the_call": round(statistics.median(_spent_s) / median_s["with"], 6),
    }
    if not options.json:
        print(f"a step of {MICRO_BATCHES} micro-batches takes {told['step_ms']} ms of CPU without remembering")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
