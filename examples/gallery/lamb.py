"""LAMB for large batches: each matrix has its own trust ratio, and one norm over all gradients is shared by the stages.

python examples/gallery/lamb.py                               one process
varuna run --workers 2 --stages 2 examples/gallery/lamb.py    two stages, the same losses
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch
from char_gpt import GPT, Windows
from torch import nn

import varuna


class Lamb(torch.optim.Optimizer):
    """LAMB as NVIDIA's: gradients are divided by their norm over the whole model before the moments see them."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        mine = [p.grad.double().square().sum() for p, _ in trained if varuna.owned(p)]
        # A stage has its own parameters only: this line adds the parts of all stages. In one process it does nothing.
        norm = varuna.all_reduce_shared(torch.stack(mine).sum()).sqrt().clamp(min=1.0)
        for p, group in trained:
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            gradient, (beta1, beta2) = p.grad / norm.to(p.dtype), group["betas"]
            mean = state["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** state["step"])
            square = state["square"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** state["step"])
            update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p
            trust = p.norm() / update.norm()
            p.sub_(group["lr"] * torch.where((trust > 0) & trust.isfinite(), trust, 1.0) * update)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="LAMB on the character-level GPT of char_gpt.py.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: GPT(args.layers, args.width, args.length),
        Windows(args.length),
        lambda named: Lamb([p for _, p in named], lr=1e-2),
        global_batch=args.global_batch,
        micro_batch=16,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
