"""A small ResNet with batch normalisation on the images of digits that scikit-learn ships (pip install scikit-learn).

python examples/gallery/resnet_digits.py                    one process
varuna run --workers 2 examples/gallery/resnet_digits.py    two workers, the same losses
"""

from argparse import ArgumentParser
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import varuna


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short = nn.Conv2d(before, after, 1, stride) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet(blocks: int, width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for after, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for block in range(blocks):
            layers.append(Residual(before, after, 1 if block else stride))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="A ResNet with batch normalisation on small images of digits.")
    parser.add_argument("--blocks", type=int, default=1, help="in each of three stages")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(arguments)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    dataset = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))

    trainer = varuna.Trainer(
        lambda: resnet(args.blocks, args.width),
        dataset,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, weight_decay=1e-4),
        global_batch=args.global_batch,
        micro_batch=32,  # the batch that batch normalisation sees, whatever the number of workers
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
