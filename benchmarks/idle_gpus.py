"""Plans for every number of workers: how many idle, and what pipelines of two depths bring over equal ones.

For each count of equal workers and each global batch: the best plan of P x D pipelines, and the best one if some may be
a stage deeper, as a run chooses it; both simulated.

python -m benchmarks.idle_gpus --calibration examples/calibrations/gpt2-2.5b-v100.json [--workers 8 64]
"""

import argparse
from pathlib import Path
from statistics import mean

from varuna.calibration.file import read_calibration
from varuna.core.devices import equal_workers
from varuna.planner.asking.request import PlanRequest
from varuna.planner.sweep import rank_plans


def main() -> None:
    """Print a row for each count that gains, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--workers", type=int, nargs=2, default=[8, 64], metavar=("FIRST", "LAST"))
    chosen = parser.parse_args()
    calibration = read_calibration(chosen.calibration)
    for batch in chosen.global_batch:
        print(f"| workers | P x D | idle | of two depths | idle | gain |   (M = {batch})")
        print("|---|---|---|---|---|---|")
        gains, idle, still_idle = [], 0, 0
        counts = range(chosen.workers[0], chosen.workers[1] + 1)
        for workers in counts:
            asked = PlanRequest(
                calibrations=calibration, workers=equal_workers(workers), global_batch=batch, memory_apart=True
            )
            equal = rank_plans(asked.model_copy(update={"mixes": False})).plans[0]
            best = rank_plans(asked).plans[0]
            gains.append(equal.step_s / best.step_s)
            idle += workers - equal.workers
            still_idle += workers - best.workers
            if not best.is_uniform:
                left = f"{workers - equal.workers} | {best.shape} | {workers - best.workers}"
                print(f"| {workers} | {equal.shape} | {left} | {gains[-1]:.3f} |", flush=True)
        print(
            f"M = {batch}: {sum(gain > 1 for gain in gains)} of {len(counts)} counts gain, {mean(gains):.3f} on "
            f"average, {max(gains):.3f} at most, {min(gains):.3f} at least; workers that idle over all counts: {idle} "
            f"before, {still_idle} now"
        )


if __name__ == "__main__":
    main()
