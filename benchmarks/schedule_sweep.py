"""Simulate how much shorter steps are with ``adaptive`` than with ``varuna``; and in-flight depths.

    python -m benchmarks.schedule_sweep

Settings: 3 to 18 stages, even or uneven by up to 20 and 40 % (drawn by a fixed seed), 2 to 20 micro-batches for each
stage, and the networks of ``benchmarks/schedules.py``; both policies hold one set of activations, and see the same
jitter.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean

from benchmarks.schedules import TESTED, costs_of, step
from varuna.schedule.policy import split_last
from varuna.simulator.costs import INPUT_SHARE, WEIGHT_SHARE, PipelineCosts, StageCosts
from varuna.simulator.step import simulate

STAGES = (3, 4, 6, 8, 12, 18)
MICRO_BATCHES = (2, 3, 4, 6, 8, 12, 20)
"""For each stage."""
UNEVEN = (0.0, 0.2, 0.4)
SEEDS = range(3)


def _scaled(stage: StageCosts, factor: float) -> StageCosts:
    times = {
        name: getattr(stage, name)
        for name in ("forward_s", "recompute_s", "backward_s", "input_s", "weight_s", "record_s")
    }
    return replace(stage, **{name: factor * value for name, value in times.items()})


def _uneven(costs: PipelineCosts, by: float) -> PipelineCosts:
    draw = random.Random(0)
    return replace(costs, stages=tuple(_scaled(stage, 1 + draw.uniform(-by, by) / 2) for stage in costs.stages))


def ratios() -> Iterator[float]:
    """Steps of ``adaptive`` over those of ``varuna``, means over the seeds, one for each setting."""
    for stages, each, by, network in product(STAGES, MICRO_BATCHES, UNEVEN, TESTED.values()):
        costs = _uneven(costs_of(stages, network, input_share=INPUT_SHARE, weight_share=WEIGHT_SHARE), by)
        seeds = SEEDS if network.jitter else range(1)
        ours, theirs = (
            fmean(step(costs, policy, each * stages, seed).step_s for seed in seeds)
            for policy in ("adaptive", "varuna")
        )
        yield ours / theirs


def depths(stages: int, micro_batches: int, limits: Sequence[int]) -> list[float]:
    """Units of a step of ``adaptive`` by network, if stage k may hold limits[k] micro-batches; means over 20 seeds."""
    found = []
    for network in TESTED.values():
        costs = costs_of(stages, network, input_share=INPUT_SHARE, weight_share=WEIGHT_SHARE)
        split = split_last(stages, micro_batches, "adaptive")
        traces = (
            simulate(
                costs,
                micro_batches=micro_batches,
                policy="adaptive",
                split_last=split,
                stash_limits=list(limits),
                seed=seed,
            )
            for seed in (range(20) if network.jitter else range(1))
        )
        found.append(fmean(trace.step_s for trace in traces))
    return found


def main() -> None:
    """Print both."""
    stages, micro_batches = 8, 32
    print(f"in-flight depth, P = {stages}, N = {micro_batches}".ljust(34) + "".join(f"{name:>8}" for name in TESTED))
    for factor in (1, 2, 3):
        units = depths(stages, micro_batches, [factor * (stages - k) + 2 for k in range(stages)])
        print(f"{factor} (P - k) + 2".ljust(34) + "".join(f"{value:8.1f}" for value in units))
    units = depths(stages, micro_batches, [micro_batches] * stages)
    print("none".ljust(34) + "".join(f"{value:8.1f}" for value in units))
    found = list(ratios())
    print(
        f"adaptive over varuna, {len(found)} settings: {fmean(found):.3f} on average, {min(found):.3f} at best, "
        f"{max(found):.3f} at worst; longer in {sum(ratio > 1 for ratio in found)}"
    )


if __name__ == "__main__":
    main()
