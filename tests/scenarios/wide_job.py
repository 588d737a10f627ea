"""A script whose stages send each other much, and compute little: rows of noise through layers that scale them."""

import argparse

import torch
from torch import Tensor, nn

import varuna

WIDTH, LAYERS = 2**15, 4


class Noise(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of normal numbers, a function of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x.float() ** 2).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    trainer = varuna.Trainer(
        Layers,
        Noise(),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2),
        global_batch=32,
        micro_batch=4,
        precision="bf16",
        cut=[f"layers.{number}" for number in range(1, LAYERS)],
    )
    for step in trainer.steps(parser.parse_args().steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r}", flush=True)


if __name__ == "__main__":
    main()
