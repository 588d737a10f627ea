"""A script whose loss has terms that count different things; ``--plain`` trains it without Varuna.

A step takes every sample of the dataset at once, so both see the same batch without agreeing on an order.
"""

import argparse
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLES, LENGTH, WIDTH, VOCABULARY = 12, 10, 12, 24


class Sentences:
    """Masked labels (none at all in a third of the samples), a mask of uneven length, and a class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=draws)
        labels = torch.where(torch.rand(LENGTH, generator=draws) < 0.1 + 0.07 * index, ids, -100)
        if index % 3 == 0:
            labels[:] = -100
        mask = (torch.arange(LENGTH) < 1 + index % 7).float()
        return {"ids": ids, "labels": labels, "mask": mask, "kind": torch.tensor(index % 2)}


class Pretraining(nn.Module):
    """Masked words, next sentence, a mean over a mask written by hand in the middle, and a regulariser."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.kinds = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor, kind: Tensor) -> Tensor:
        x = self.embed(ids)
        early = x
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            early = x if index == 1 else early
        words = F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())
        following = F.cross_entropy(self.kinds(x.mean(1)), kind)
        middle = (early.pow(2).mean(-1) * mask).sum() / mask.sum()
        total: Tensor = words + 0.5 * following + 0.3 * middle + 0.01 * self.kinds.weight.pow(2).sum()
        return total


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plainly(steps: int) -> None:
    torch.manual_seed(0)
    model = Pretraining()
    optimizer = adamw(model.parameters())
    samples = [Sentences()[index] for index in range(SAMPLES)]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {float(loss.detach())!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--compile", default=False)
    parser.add_argument("--misbehave", default="")
    parser.add_argument("--folder", type=Path, default=Path())
    args = parser.parse_args()
    if args.plain:
        plainly(args.steps)
        return
    import varuna

    job = import_module("job")  # beside this script

    seen: list[varuna.Step] = []
    job.misbehave(args.misbehave, args.folder, patient=True, seen=seen)
    trainer = varuna.Trainer(
        model=Pretraining,
        dataset=Sentences(),
        optimizer=lambda named: adamw([parameter for _, parameter in named]),
        global_batch=SAMPLES,
        micro_batch=2,
        clip_grad_norm=1.0,
        compile=args.compile,
    )
    for step in trainer.steps(args.steps):
        seen.append(step)
        if step.plan.replicas < 2:
            time.sleep(0.8)  # until every section is held twice again


if __name__ == "__main__":
    main()
