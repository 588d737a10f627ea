"""Simulate the worth of an order by length: steps over those with micro-batches in the order of the samples.

Work is drawn as lengths of texts are distributed (log-normal), and rounded up to as many lengths as are declared.

    python -m benchmarks.work_order [--lengths 6] [--draws 8]
"""

import argparse
from collections.abc import Sequence
from statistics import mean

from benchmarks.emulated.work import Work
from varuna.schedule.work_order import by_work
from varuna.simulator.costs import LinkCosts, PipelineCosts, StageCosts
from varuna.simulator.step import simulate

STAGE = StageCosts(forward_s=1, recompute_s=1, backward_s=2, input_s=1.2, weight_s=0.8)
SHAPES = (2, 8), (2, 16), (3, 24), (4, 8), (4, 16), (4, 32), (8, 16), (8, 32), (8, 64), (12, 36)
SPREADS = 0.3, 0.6


def declared(shares: Sequence[float], lengths: int) -> list[float]:
    """Work rounded up to one of so many lengths, of which each serves as many micro-batches."""
    ascending = sorted(shares)
    limits = [ascending[max(0, (number + 1) * len(shares) // lengths - 1)] for number in range(lengths)]
    return [next(limit for limit in limits if share <= limit) for share in shares]


def ratio(stages: int, micro_batches: int, work: Sequence[float]) -> float:
    """A step in an order by work over one in the given order."""
    costs = PipelineCosts(stages=(STAGE,) * stages, links=(LinkCosts(),) * (stages - 1))

    def step_s(ordered: Sequence[float]) -> float:
        return simulate(costs, micro_batches=micro_batches, policy="adaptive", split_last=stages, work=ordered).step_s

    return step_s([work[number] for number in by_work(work, stages)]) / step_s(work)


def main() -> None:
    """Print a row for each P and N."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, default=6)
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    print("| P | N |", *(f"spread {spread} | worst draw |" for spread in SPREADS))
    print("|---|---|" + "---|---|" * len(SPREADS))
    for stages, micro_batches in SHAPES:
        cells = []
        for spread in SPREADS:
            draws = [Work(stages, micro_batches, spread, seed=seed).shares for seed in range(options.draws)]
            found = [ratio(stages, micro_batches, declared(shares, options.lengths)) for shares in draws]
            cells.append(f"{mean(found):.3f} | {max(found):.3f} |")
        print(f"| {stages} | {micro_batches} |", *cells, flush=True)


if __name__ == "__main__":
    main()
