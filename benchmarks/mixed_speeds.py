"""Two fast and some slow workers: seconds of a step with micro-batches dealt by speed, and against the bound.

CPU workers train ``tests/scenarios/job.py``; a forward sleeps in addition, twice as long on slow workers, so
that speeds are what they are said to be on any machine. The manager finds out by itself who is slow.

- bound: what the same micro-batches take if each worker computes at its speed all the time, and nothing is sent.
- equal: all workers get as many micro-batches, as if all were as fast as the slowest.
- dealt: as ``varuna run`` does it where nobody says which workers are slow.
- by class: the same where slow workers are of a device class of their own, which is calibrated by its own steps.

    python -m benchmarks.mixed_speeds [--sleep 0.1] [--steps 40]

Each figure is the median of the last steps of a run. The last line is JSON.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from tests.scenarios.launch import json_log
from tests.scenarios.play import Play
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.stutter import SLOW_RATIO
from varuna.planner.choose import planner

MICRO_BATCHES, LAST = 48, 10


def step_s(
    workers: int, slow: int, sleep_s: float, steps: int, *, deals: bool, by_class: bool = False
) -> tuple[float, str]:
    """Median seconds of the last steps, and how micro-batches are shared in the end."""
    names = ",".join(f"w{workers - 1 - number}" for number in range(slow))
    job = ("--steps", steps, "--global-batch", MICRO_BATCHES, "--micro-batch", 1, "--compute", sleep_s)
    config = FleetConfig(workers=workers, replace=False, slow_ratio=SLOW_RATIO if deals else None)
    with tempfile.TemporaryDirectory() as folder:
        args = (*map(str, job), "--slow-class" if by_class else "--slow-workers", names)
        plan = planner(memory_bytes=None, stages=1)
        calibrator = Calibrator(plan, run_dir=Path(folder) / "run", cache=None) if by_class else None
        play = Play(Path(folder), *args, planner=lambda workers: 1, config=config, calibrator=calibrator)
        play.thread.join()
        play.finish()
        times = [row["wall_time"] for row in json_log(Path(folder) / "log.jsonl")][-LAST - 1 :]
        shares = " ".join(map(str, play.run.manager.fleet.record.plan.shares))
    return statistics.median(after - before for before, after in itertools.pairwise(times)), shares


def main() -> None:
    """Run all of them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds, of a forward of a fast worker")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    alone_s, _ = step_s(1, 0, args.sleep, LAST + 2, deals=False)
    print(f"one fast worker: {alone_s:.2f} s per step of {MICRO_BATCHES} micro-batches")
    found = []
    for slow in (2, 4):
        bound_s = alone_s / (2 + slow / 2)
        equal_s, _ = step_s(2 + slow, slow, args.sleep, LAST + 2, deals=False)
        dealt_s, shares = step_s(2 + slow, slow, args.sleep, args.steps, deals=True)
        class_s, by_class = step_s(2 + slow, slow, args.sleep, args.steps, deals=True, by_class=True)
        found.append({"slow": slow, "bound_s": bound_s, "equal_s": equal_s, "dealt_s": dealt_s, "class_s": class_s})
        print(f"2 fast, {slow} slow: bound {bound_s:.2f} s, equal {equal_s:.2f} s")
        for how, seconds, dealing in (("dealt", dealt_s, shares), ("by class", class_s, by_class)):
            print(
                f"  {how}: {seconds:.2f} s ({dealing}): {seconds / bound_s:.2f} of the bound, "
                f"{equal_s / seconds:.2f} times as fast as equal",
                flush=True,
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
