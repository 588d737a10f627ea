"""Measure the time that the watch on a script's objects adds to a step: models of several sizes, side by side.

    python benchmarks/handed_over_cost.py

For each model: parameters, modules, microseconds per step with the watch, and its bound: 50 and 1 for each parameter.
The first ones are plain stacks; the last is GPT-2 of Transformers, whose code reads tables of functions.
"""

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from varuna.job.handed_over.watching import BEFORE_STEP, COLLATE, DATASET, LOSS, METRICS, HandedOver

ROUNDS, STEPS = 15, 100
scale = 1.0


class Samples:
    """A dataset with an option."""

    level = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), float(index)) * (1 + self.level)}


def model_of(layers: int) -> nn.Module:
    """A stack with two modules and four parameters a layer."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.LayerNorm(8))))


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss that reads a global."""
    return scale * (output - batch["x"]).pow(2).mean()


def metrics(output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums that read a global."""
    return {"large": (output > scale).sum() + 0 * batch["x"].sum()}


def before_step(named: list[tuple[str, nn.Parameter]]) -> None:
    """Scales gradients."""
    for _, parameter in named:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks."""
    return {"x": torch.stack([each["x"] for each in samples]) * scale}


def gpt2() -> nn.Module:
    """GPT-2 with all of its layers, and small ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=24, n_head=4, vocab_size=64, n_positions=32, eos_token_id=0))


def watched_us(model: nn.Module, *, watches: bool) -> float:
    """Microseconds of this thread's CPU time for a turn of the loop that writes the rate, in the fastest round."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    functions = ((LOSS, loss), (METRICS, metrics), (BEFORE_STEP, before_step), (COLLATE, collate), (DATASET, Samples()))
    handed = HandedOver(functions, model=model, optimizer=optimizer)
    if watches:
        handed.before_capture()
        handed.begin()
    taken = []
    for repeat in range(ROUNDS):
        begin_s = time.thread_time()
        for step in range(STEPS):
            options = [{**group, "params": []} for group in optimizer.param_groups]
            if watches:
                with handed.script(options):
                    optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
                handed.check(None)
                handed.written(repeat * STEPS + step)
            else:
                optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        taken.append((time.thread_time() - begin_s) / STEPS * 1e6)
    handed.end()
    return min(taken)


def main() -> None:
    """Print a table."""
    print(f"{'parameters':>10} {'modules':>8} {'bare us':>8} {'watched us':>11} {'bound us':>9}")
    for model in (*map(model_of, (2, 25, 100, 400)), gpt2()):
        bare, watched = watched_us(model, watches=False), watched_us(model, watches=True)
        count, modules = (sum(1 for _ in each) for each in (model.parameters(), model.modules()))
        print(f"{count:>10} {modules:>8} {bare:>8.1f} {watched:>11.1f} {50 + count:>9}")


if __name__ == "__main__":
    main()
