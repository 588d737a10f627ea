"""A Vision Transformer on the images of digits that scikit-learn ships (pip install scikit-learn).

python examples/gallery/vit_digits.py                    one process
varuna run --workers 2 examples/gallery/vit_digits.py    two workers, the same losses
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import varuna

HELD_OUT = 297
"""of 1,797 images"""


class Digits(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Images of 8 x 8 pixels, moved by up to a pixel if ``moved``."""

    def __init__(self, part: slice, moved: bool) -> None:
        found = load_digits()
        self.images = torch.tensor(found.images[part], dtype=torch.float32)[:, None] / 8 - 1
        self.labels, self.moved = torch.tensor(found.target[part]), moved

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        if self.moved:
            padded = nn.functional.pad(image, (1, 1, 1, 1), value=-1.0)
            y, x = torch.randint(3, (2,)).tolist()
            image = padded[:, y : y + 8, x : x + 8]
        return {"pixel_values": image, "labels": self.labels[index]}


def build(layers: int, width: int) -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width,
        initializer_range=0.1,
    )
    config.num_labels = 10
    return ViTForImageClassification(config)


def right(output: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"right": (output.logits.argmax(1) == batch["labels"]).sum()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="A Vision Transformer on small images of digits.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: build(args.layers, args.width),
        Digits(slice(HELD_OUT, None), moved=True),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3),
        global_batch=args.global_batch,
        micro_batch=16,
        metrics=right,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    found = trainer.evaluate(Digits(slice(HELD_OUT), moved=False))
    if step.is_main:
        print(f"{found.metrics['right'] / HELD_OUT:.1%} of {HELD_OUT} other images are right")


if __name__ == "__main__":
    main()
