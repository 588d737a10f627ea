"""Measure the quality of the planner's search on random models and networks: figures, never asserted.

    python -m benchmarks.search_quality                # both parts, some minutes
    python -m benchmarks.search_quality --models 20 --seed 1

1. The plan of a search that stops at the first winner, against the best of ranking every depth exactly.
2. Small cases with more GPUs, memory or bandwidth: how often the plan becomes more than 1 % slower, and by how much.
"""

import argparse
import json
import random
import time

from varuna.calibration.format import Calibration, Calibrations, Jitter, Link, NetworkCosts, Ring
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import equal_workers
from varuna.core.model import ModelFacts, SectionFacts
from varuna.planner.asking.request import PlanRequest
from varuna.planner.sweep import rank_plans

MB, GB = 10**6, 10**9
_DEPTHS = 30
_WORSE = 1.01


def calibration(chance: random.Random, sections: int) -> Calibration:
    """Uneven sections, some of which repeat."""
    few = [_section(chance) for _ in range(chance.randint(1, 10))]
    sequence = tuple(few[i * len(few) // sections] for i in range(sections))
    last = sequence[-1].model_copy(update={"boundary_bytes": 0})
    facts = ModelFacts(digest="random", sections=(*sequence[:-1], last))
    latency_s = chance.choice([0.0, 0.0003, 0.005])
    jitter = Jitter(mean_s=chance.choice([0.0, 0.002]))
    return with_speed(nominal_calibration(facts), latency_s, 10 ** chance.uniform(-1.5, 1.5), jitter)


def _section(chance: random.Random) -> SectionFacts:
    parameter_bytes = chance.randint(0, 500 * MB)
    return SectionFacts(
        label="layer",
        forward_s=chance.uniform(0.001, 0.1),
        parameter_bytes=parameter_bytes,
        trainable_bytes=parameter_bytes,
        optimizer_bytes=2 * parameter_bytes,
        activation_bytes=chance.randint(0, 200 * MB),
        boundary_bytes=chance.randint(0, 20 * MB),
    )


def with_speed(base: Calibration, latency_s: float, speed: float, jitter: Jitter) -> Calibration:
    """On links of 1.1 GB/s and rings of 0.47 GB/s, times ``speed``."""
    network = NetworkCosts(
        link=Link(latency_s=latency_s, bytes_per_s=1.1e9 * speed, jitter=jitter),
        rings=(Ring(latency_s=latency_s, bytes_per_s=0.47e9 * speed),),
    )
    return base.model_copy(update={"across_vms": network})


def best_s(request: PlanRequest) -> float:
    """Seconds of the chosen plan; infinite if nothing fits."""
    plans = rank_plans(request).plans
    return plans[0].step_s if plans else float("inf")


def against_all(models: int, seed: int) -> dict[str, object]:
    """Part 1."""
    losses = []
    for number in range(models):
        chance = random.Random(f"{seed} {number}")
        request = PlanRequest(
            calibrations=Calibrations.of_one(calibration(chance, chance.randint(8, 30))),
            workers=equal_workers(chance.randint(4, 64)),
            global_batch=chance.randint(32, 2048),
            micro_batch=chance.randint(1, 4),
            memory_bytes=int(10 ** chance.uniform(9.5, 11)),
        )
        found = best_s(request)
        if found < float("inf"):
            losses.append(found / best_s(request.model_copy(update={"wanted": _DEPTHS})) - 1)
    return {
        "models": len(losses),
        "same": sum(loss < 1e-9 for loss in losses),
        "worst": round(max(losses), 4),
        "mean": round(sum(losses) / len(losses), 5),
    }


def more_of_anything(models: int, seed: int) -> dict[str, object]:
    """Part 2."""
    worse: dict[str, list[float]] = {}
    asked = 0
    for number in range(models):
        chance = random.Random(f"{seed} small {number}")
        known = calibration(chance, chance.randint(1, 12))
        request = PlanRequest(
            calibrations=Calibrations.of_one(known),
            workers=equal_workers(chance.randint(1, 16)),
            global_batch=chance.randint(4, 96),
            micro_batch=chance.randint(1, 4),
            memory_bytes=int(10 ** chance.uniform(8.5, 11)),
        )
        link, memory_bytes = known.across_vms.link, request.memory_bytes or 0
        faster = (with_speed(known, link.latency_s, more * link.bytes_per_s / 1.1e9, link.jitter) for more in (1.2, 5))
        richer: dict[str, dict[str, object]] = {
            "GPUs + 1": {"workers": equal_workers(request.count + 1)},
            "GPUs x 2": {"workers": equal_workers(request.count * 2)},
            "memory x 1.15": {"memory_bytes": int(memory_bytes * 1.15)},
            "memory x 2": {"memory_bytes": memory_bytes * 2},
            "bandwidth x 1.2": {"calibrations": Calibrations.of_one(next(faster))},
            "bandwidth x 5": {"calibrations": Calibrations.of_one(next(faster))},
        }
        before_s = best_s(request)
        for name, changes in richer.items():
            asked += 1
            ratio = best_s(request.model_copy(update=changes)) / before_s if before_s < float("inf") else 0.0
            if ratio > _WORSE:
                worse.setdefault(name, []).append(round(ratio - 1, 3))
    return {"comparisons": asked, "worse": {name: sorted(values, reverse=True) for name, values in worse.items()}}


def main() -> None:
    """Both parts, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=240, help="of each part")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for part in (against_all, more_of_anything):
        begin_s = time.process_time()
        found = part(args.models, args.seed)
        print(json.dumps({"part": part.__name__, **found, "cpu_s": round(time.process_time() - begin_s)}), flush=True)


if __name__ == "__main__":
    main()
