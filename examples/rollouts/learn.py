"""Trains a policy on what rollout processes append meanwhile, and publishes it for them.

python examples/rollouts/roll.py FOLDER &                     as many as you like, before or after the learner
varuna run --workers 2 examples/rollouts/learn.py FOLDER      or python, or torchrun
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from policy import Policy, clipped_loss, reward
from torch import Tensor

import varuna
from varuna.extras.rollouts import Rollouts


def rewards(output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"reward": reward(batch["state"], batch["action"]).sum()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Learn from rollouts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=8)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        Policy,
        Rollouts(args.folder / "rollouts", batch=args.global_batch, staleness=args.staleness),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=5e-3, eps=1e-5),
        global_batch=args.global_batch,
        micro_batch=16,
        loss=clipped_loss,
        metrics=rewards,
        publish=varuna.Publish(args.folder / "served", every=2),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.7f} reward {step.metrics['reward'] / args.global_batch:.2f}")


if __name__ == "__main__":
    main()
