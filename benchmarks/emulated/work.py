"""Times of slept compute that varies: by micro-batch, on one stage, or now and then.

All engines sleep by the same rules, which a process finds in its environment; numbers are drawn from the seed alone.
"""

import os
import random
from collections.abc import Sequence
from functools import cache
from math import exp, log, sqrt
from typing import NamedTuple

VARIABLE = "VARUNA_BENCH_WORK"
LENGTHS = range(2, 10)
"""That an engine is told of, where the work of micro-batches differs."""
_EVERY = 20
"""One action of so many stalls, on the stage that does."""


class Work(NamedTuple):
    """The ways in which work varies."""

    stages: int
    micro_batches: int
    spread: float = 0.0
    """coefficient of variation of micro-batches' work, which is distributed as lengths of texts are: log-normal"""
    slow: float = 1.0
    """time of the middle stage over that of the others"""
    stall: float = 0.0
    """units by which some actions of the middle stage are longer"""
    seed: int = 0

    def described(self) -> dict[str, str]:
        """The environment of a process that is to sleep by this."""
        return {VARIABLE: " ".join(map(str, self))}

    @property
    def shares(self) -> tuple[float, ...]:
        """By micro-batch: of the mean one's work."""
        return _shares(self.micro_batches, self.spread, self.seed)

    @property
    def varies(self) -> bool:
        """Whether anything does."""
        return self.spread > 0 or self.slow != 1 or self.stall > 0

    def units(self, units: float, stage: int, micro_batch: int, kind: str) -> float:
        """Return the time of an action that would take ``units``."""
        taken = units * self.shares[micro_batch] if self.spread else units
        if stage != self.stages // 2:
            return taken
        stalls = self.stall and random.Random(f"{self.seed} {micro_batch} {kind}").randrange(_EVERY) == 0
        return taken * self.slow + (self.stall if stalls else 0.0)


@cache
def _shares(count: int, spread: float, seed: int) -> tuple[float, ...]:
    draw, sigma = random.Random(seed), sqrt(log(1 + spread**2))
    drawn = [exp(draw.gauss(0.0, sigma)) for _ in range(count)]
    return tuple(each * count / sum(drawn) for each in drawn)


def lengths_of(shares: Sequence[float]) -> list[int]:
    """By micro-batch, a declared length: of all, as many have each, and the more work the longer."""
    ascending = sorted(range(len(shares)), key=lambda number: shares[number])
    ranks = {number: rank for rank, number in enumerate(ascending)}
    return [LENGTHS[ranks[number] * len(LENGTHS) // len(shares)] for number in range(len(shares))]


@cache
def work() -> Work:
    """That of this process: by default, nothing varies."""
    stages, micro_batches, spread, slow, stall, seed = os.environ.get(VARIABLE, "0 0 0 1 0 0").split()
    return Work(int(stages), int(micro_batches), float(spread), float(slow), float(stall), int(seed))
