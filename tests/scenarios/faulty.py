"""A training script with the one fault that its first argument names; the rest of it is ``job.py``'s model and data."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varuna
from tests.scenarios.job import LAYERS, Language, Sentences
from tests.waiting import wait_for

FAULT_STEP, SAVE_EVERY = 2, 2


class Branching(Language):
    """Cannot be exported: a Python branch depends on what training changes."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.rand([]) > 0.5:
            labels = labels + 0
        return super().forward(tokens, labels)


class Broken(Sentences):
    """``dataset[7]`` cannot be read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 7:
            raise OSError("sentence 7 is on a disk that is gone")
        return super().__getitem__(index)


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Fails on the micro-batches of the run; the one for capture has two sentences."""
    if len(samples) == 3:
        raise KeyError("cannot collate three")
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    raise LookupError(f"no learning rate for {named[0][0]}")


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)


def metrics(output: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    raise AttributeError(f"no accuracy in a {type(output).__name__}")


def before_step(named: list[tuple[str, nn.Parameter]]) -> None:
    raise ArithmeticError(f"{named[0][0]} has a bad gradient")


def diverge(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=float("inf"))


ARGUMENTS: dict[str, dict[str, Any]] = {
    "branch": {"model": lambda: Branching(LAYERS, 0.0)},
    "dataset": {"dataset": Broken(unstable=False)},
    "unstable": {"dataset": Sentences(unstable=True)},
    "collate": {"collate": collate, "micro_batch": 3},
    "optimizer": {"optimizer": optimizer},
    "metrics": {"metrics": metrics},
    "before-step": {"before_step": before_step},
    "nan": {"optimizer": diverge},
    "nan-goes-on": {"optimizer": diverge, "on_nan": "continue"},
    "micro-batch": {"micro_batch": 13},
    "none": {},
    "exit": {},
    "raise": {},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=ARGUMENTS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--global-batch", type=int, default=12)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--patient", action="store_true", help="wait for each checkpoint, so that none is skipped")
    parser.add_argument("--mark", help="nothing but a text by which this run's processes are found")
    parser.add_argument("--checkpoint-dir")
    args = parser.parse_args()
    chosen: dict[str, Any] = {
        "model": lambda: Language(args.layers, 0.0),
        "dataset": Sentences(unstable=False),
        "optimizer": adam,
        "global_batch": args.global_batch,
        "micro_batch": 2,
        "cut": args.layers + 1,
        **ARGUMENTS[args.fault],
    }
    trainer = varuna.Trainer(
        **chosen,
        seed=args.seed,
        checkpoints=args.checkpoint_dir and varuna.Checkpoints(args.checkpoint_dir, every=SAVE_EVERY),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss!r} generation {step.generation}", flush=True)
        if args.patient and step.index % SAVE_EVERY == SAVE_EVERY - 1:
            manifest = Path(args.checkpoint_dir, f"step-{step.index + 1:08d}", "manifest.json")
            wait_for(manifest.exists)
        if step.index == FAULT_STEP and args.fault == "exit":
            sys.exit(3)
        if step.index == FAULT_STEP and args.fault == "raise" and not step.is_main:
            raise ValueError(f"a bug of the user at step {step.index}")
    print("after the loop", file=sys.stderr)


if __name__ == "__main__":
    main()
