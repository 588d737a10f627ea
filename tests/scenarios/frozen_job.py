"""Adapters over a frozen base that is most of the model; the worker that makes ``--killed`` first kills itself."""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

import varuna
from tests.unit.engine.models import Tokens, adamw

STEPS, AT = 6, 2
WIDTH, LAYERS = 128, 10


class Base(nn.Module):
    """Layers of 64 KiB, and beside each an adapter of 2 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(input_ids)
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = x + torch.tanh(layer(x) + up(down(x)))
        return nn.functional.cross_entropy((x @ self.embed.weight.T / WIDTH).flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed", type=Path)
    told = parser.parse_args()
    trainer = varuna.Trainer(Base, Tokens(), adamw, global_batch=8, micro_batch=1, device="cpu")
    for step in trainer.steps(STEPS):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.9g}", flush=True)
        elif told.killed is not None and step.index == AT:
            try:
                told.killed.touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
