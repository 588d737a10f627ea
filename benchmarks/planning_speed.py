"""Seconds and bytes that schedules, simulation and planning take in plain Python: printed, never asserted.

python -m benchmarks.planning_speed
"""

import json
import resource
import time
from collections.abc import Callable

from benchmarks.paper.calibrations import GPT2, calibrate
from benchmarks.paper.machines import V100
from varuna.calibration.format import Calibration, Calibrations
from varuna.core.devices import equal_workers
from varuna.planner.asking.request import PlanRequest
from varuna.planner.sweep import rank_plans
from varuna.schedule.orders import varuna
from varuna.simulator.costs import uniform
from varuna.simulator.step import simulate

_CALLS = 3


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, the best of some."""
    times = []
    for _ in range(_CALLS):
        begin_s = time.process_time()
        work()
        times.append(time.process_time() - begin_s)
    return round(min(times), 3)


def sweep(calibration: Calibration, workers: int, global_batch: int) -> None:
    """All P, all m, with kept sections and drain splits."""
    rank_plans(
        PlanRequest(
            calibrations=Calibrations.of_one(calibration), workers=equal_workers(workers), global_batch=global_batch
        )
    )


def main() -> None:
    """The sizes of the paper: 36 x 682, and sweeps of all depths and micro-batch sizes."""
    whole, half = (calibrate(GPT2["8.3b"], V100, whole_layers=whole_layers) for whole_layers in (True, False))
    result = {
        "order_36x682_s": seconds(lambda: varuna(36, 682)),
        "simulate_36x682_s": seconds(lambda: simulate(uniform(36), micro_batches=682, policy="adaptive")),
        "sweep_128_gpus_74_sections_s": seconds(lambda: sweep(whole, 128, 8192)),
        "sweep_128_gpus_146_sections_s": seconds(lambda: sweep(half, 128, 8192)),
        "sweep_4096_gpus_74_sections_s": seconds(lambda: sweep(whole, 4096, 65536)),
        "sweep_4096_gpus_146_sections_s": seconds(lambda: sweep(half, 4096, 65536)),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
