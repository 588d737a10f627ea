"""Throughput with a dataset that takes 20 ms a sample, over that of one that takes none.

A small model on two workers; samples are read by a thread (0) and by processes (`num_workers=`). A ratio near 1 says
that reading is hidden. With `--computes` a sample takes processor time; else it sleeps, as a disk or a network does.
Rounds are interleaved and the best of each counts, since the machine may be busy. The last line is JSON.

    python benchmarks/slow_samples.py [--steps 40] [--sample-ms 20] [--processes 0 8] [--computes] [--rounds 3]
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from benchmarks.forked import run_ranks
from varuna import Trainer

MICRO_BATCH, GLOBAL_BATCH, WORKERS = 4, 16, 2
_BLOCK = bytes(65_536)


class Net(nn.Module):
    """Some 20 ms per micro-batch on one thread: a quarter of what it takes to read one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        x = torch.tanh(self.layers(x))
        return x.square().mean(dim=(1, 2)).mean()


class Slow:
    """Waits or computes before each sample, as a disk or a decoder does."""

    def __init__(self, sample_s: float, computes: bool) -> None:
        self._sample_s, self._computes = sample_s, computes

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._computes:
            until_s = time.thread_time() + self._sample_s
            while time.thread_time() < until_s:
                hashlib.sha1(_BLOCK).digest()
        else:
            time.sleep(self._sample_s)
        return {"x": torch.full((16, 1024), index / 4096)}


def examples_per_s(sample_s: float, computes: bool, processes: int, steps: int) -> float:
    """Of two workers, over the second half of the steps."""

    def job() -> Iterator[float]:
        trainer = Trainer(
            Net,
            Slow(sample_s, computes),
            lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
            GLOBAL_BATCH,
            micro_batch=MICRO_BATCH,
            num_workers=processes,
        )
        for _ in trainer.steps(steps):
            yield time.perf_counter()

    def rate() -> float:
        times = list(job())
        half = len(times) // 2
        return (len(times) - 1 - half) * GLOBAL_BATCH / (times[-1] - times[half])

    return float(run_ranks(WORKERS, rate))


def main() -> None:
    """Measure, print, and end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--sample-ms", type=float, default=20.0)
    parser.add_argument("--processes", nargs="+", type=int, default=[0, 8])
    parser.add_argument("--computes", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    kinds = {"ready": (0.0, 0)} | {str(each): (given.sample_ms / 1000, each) for each in given.processes}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(given.rounds):
        for kind, (sample_s, processes) in kinds.items():
            rates[kind].append(examples_per_s(sample_s, given.computes, processes, given.steps))
            print(f"{kind}: {rates[kind][-1]:.1f} examples/s", file=sys.stderr, flush=True)
    best = {kind: max(found) for kind, found in rates.items()}
    print(f"samples that are ready: {best['ready']:.1f} examples/s on {WORKERS} workers, best of {given.rounds}")
    ratios = {kind: round(rate / best["ready"], 3) for kind, rate in best.items() if kind != "ready"}
    for kind, ratio in ratios.items():
        how = "a thread each" if kind == "0" else f"{kind} processes each"
        print(f"{given.sample_ms:g} ms a sample, read by {how}: {best[kind]:.1f} examples/s, {ratio:.2f} of that")
    print(json.dumps({"of_ready_samples": ratios, "examples_per_s": best}))


if __name__ == "__main__":
    main()
