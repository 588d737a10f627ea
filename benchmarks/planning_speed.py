"""Seconds that schedules, simulation and planning take in plain Python: printed, never asserted.

python benchmarks/planning_speed.py
"""

import json
import time
from collections.abc import Callable

from varuna.core.model import ModelFacts, SectionFacts
from varuna.planner.plans import rank_plans
from varuna.schedule.orders import varuna
from varuna.simulator.costs import uniform
from varuna.simulator.step import simulate


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    begin_s = time.process_time()
    work()
    return round(time.process_time() - begin_s, 3)


def main() -> None:
    """The sizes of the paper: 36 x 682, and a sweep of all depths for 128 and 4,096 workers."""
    section = SectionFacts(
        label="layer",
        forward_s=0.0056,
        parameter_bytes=450_000_000,
        trainable_bytes=450_000_000,
        optimizer_bytes=900_000_000,
        activation_bytes=100_000_000,
        boundary_bytes=6_000_000,
    )
    facts = ModelFacts(digest="benchmark", sections=(section,) * 60)

    def sweep(workers: int, global_batch: int) -> None:
        rank_plans(facts, workers=workers, global_batch=global_batch, micro_batch=4, memory_bytes=16 * 10**9)

    result = {
        "order_36x682_s": seconds(lambda: varuna(36, 682)),
        "simulate_36x682_s": seconds(lambda: simulate(uniform(36), micro_batches=682)),
        "sweep_128_workers_s": seconds(lambda: sweep(128, 8192)),
        "sweep_4096_workers_s": seconds(lambda: sweep(4096, 65536)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
