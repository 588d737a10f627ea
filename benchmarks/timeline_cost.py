"""Measure the cost of remembering the newest steps for `varuna timeline`: steps with it over steps without it.

Two ranks as threads train a model of two tiny layers with many micro-batches, so that a step is nearly nothing but
actions and messages to remember. In one process, blocks of steps with and without remembering alternate; the CPU time
of the main rank's training thread is compared, since the machine may be busy. That ratio has a noise of some per cent,
as blocks without remembering that are compared with one another show; so the calls themselves are timed too: gathering
what was sent and what has arrived, and keeping it. The note that a receiver makes of each message that arrives, on its
own thread, is timed in a loop and counted on top.

    python -m benchmarks.timeline_cost [--blocks 16] [--steps 8] [--json]
"""

import argparse
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from benchmarks.engine_overhead import Numbers, two_layers
from varuna.engine.pipeline.runtime import Runtime
from varuna.engine.pipeline.timeline import Messages
from varuna.engine.shown.recent_steps import RanStep, RecentSteps
from varuna.testing import run

MICRO_BATCHES = 64
_NOTES = 100_000
_take, _take_messages = RecentSteps.add_step, Runtime.take_messages
_spent_s: list[float] = []
"""Of both calls together, by step of any rank."""
_gathering = threading.local()
_arrived: list[int] = []


def _forget(recent: RecentSteps, ran: RanStep) -> None:
    """Do without."""


def _no_messages(runtime: Runtime) -> Messages:
    return Messages(micro_batches=(), activations=[], gradients=[])


def _timed(recent: RecentSteps, ran: RanStep) -> None:
    """Remember, and note what that takes."""
    begin_s = time.thread_time()
    _take(recent, ran)
    _spent_s.append(_gathering.spent_s + time.thread_time() - begin_s)


def _timed_messages(runtime: Runtime) -> Messages:
    begin_s = time.thread_time()
    found = _take_messages(runtime)
    _gathering.spent_s = time.thread_time() - begin_s
    _arrived.append(len(found.arrivals))
    return found


Mode = tuple[Callable[[RecentSteps, RanStep], None], Callable[[Runtime], Messages]]
MODES: dict[str, Mode] = {
    "without": (_forget, _no_messages),
    "with": (_timed, _timed_messages),
    "again without": (_forget, _no_messages),
}


def _switch(mode: str) -> None:
    take, take_messages = MODES[mode]
    setattr(RecentSteps, "add_step", take)  # noqa: B010 - mypy takes no assignment to a method
    setattr(Runtime, "take_messages", take_messages)  # noqa: B010


def note_s() -> float:
    """CPU seconds of a receiver's note of one message."""
    notes: deque[tuple[Hashable, float]] = deque(maxlen=1000)
    begin_s = time.thread_time()
    for number in range(_NOTES):
        notes.append((number, time.monotonic()))
    return (time.thread_time() - begin_s) / _NOTES


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
        setattr(RecentSteps, "add_step", _take)  # noqa: B010
        setattr(Runtime, "take_messages", _take_messages)  # noqa: B010
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
    calls_s = statistics.median(_spent_s)
    arrived = statistics.median(_arrived)
    told: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES,
        "step_ms": round(1e3 * median_s["without"], 3),
        "with_over_without": round(median_s["with"] / median_s["without"], 4),
        "without_over_without": round(median_s["again without"] / median_s["without"], 4),
        "arrivals": arrived,
        "calls_us": round(1e6 * calls_s, 1),
        "notes_us": round(1e6 * arrived * note_s(), 1),
        "share": round((calls_s + arrived * note_s()) / median_s["with"], 6),
    }
    if not options.json:
        print(f"a step of {MICRO_BATCHES} micro-batches takes {told['step_ms']} ms of CPU without remembering")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
