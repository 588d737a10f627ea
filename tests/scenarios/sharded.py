"""A training script whose samples lie in shards: in a folder or a bucket."""

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import varuna
from varuna.extras.shards import Shards


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--die-at", type=int, help="rank 1 is killed after this step, once")
    parser.add_argument("--num-workers", type=int)
    given = parser.parse_args()
    dataset = Shards(given.place, window=2, cache=given.cache, cache_bytes=3500)
    trainer = varuna.Trainer(
        Classifier, dataset, optimizer, 8, micro_batch=2, num_workers=given.num_workers, cut=4
    )  # fmt: skip
    died = given.cache.with_name("died")
    for step in trainer.steps(given.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r}", flush=True)
        elif step.index == given.die_at and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
