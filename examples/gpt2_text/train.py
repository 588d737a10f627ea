"""Train GPT-2 on text. The same file runs in four ways, without edits:

python train.py                             one process
torchrun --nproc-per-node 4 train.py        a fixed number of processes
varuna run --workers 4 train.py             elastic on this machine: workers may die and come back
varuna agent JOIN -- train.py               elastic on a cluster, on each machine (docs/cluster.md)
"""

from argparse import ArgumentParser

import torch
from model import add_arguments, build_model
from text import TextDataset

import varuna


def main() -> None:
    parser = ArgumentParser(description="Train GPT-2 on the sources of the standard library.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--global-batch", type=int, default=16, help="examples per step")
    parser.add_argument("--checkpoint-dir", help="save here, and resume from here")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add_arguments(parser)
    args = parser.parse_args()
    saved = args.checkpoint_dir and varuna.Checkpoints(args.checkpoint_dir, every=args.checkpoint_every)

    trainer = varuna.Trainer(
        model=lambda: build_model(args),
        dataset=TextDataset(args.length),
        optimizer=lambda named: torch.optim.AdamW(
            [p for _, p in named], lr=args.learning_rate, fused=torch.cuda.is_available()
        ),
        global_batch=args.global_batch,
        seed=args.seed,
        checkpoints=saved,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
