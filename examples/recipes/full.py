"""Full fine-tuning of a causal language model on chats, with warm-up, a cosine and clipped gradients.

varuna run -n 3 examples/recipes/full.py --model Qwen3-1.7B --data chats.jsonl
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

import varuna
from varuna.integrations.pretrained import Chats, config_of, tokenizer_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Full fine-tuning of a causal language model on chats.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help='a file with {"messages": [...]} on each line')
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--export", default="trained", help="the folder for the trained model")
    args = parser.parse_args(arguments)

    config = config_of(args.model, AutoModelForCausalLM)
    rows = Chats(args.data, tokenizer_of(args.model), args.length)

    def adamw(named: Sequence[tuple[str, Any]]) -> torch.optim.Optimizer:
        matrices = {"params": [each for _, each in named if each.dim() > 1], "weight_decay": 0.1}
        rest = {"params": [each for _, each in named if each.dim() <= 1], "weight_decay": 0.0}
        return torch.optim.AdamW([matrices, rest], lr=args.lr, betas=(0.9, 0.95))

    trainer = varuna.Trainer(
        lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        rows,
        adamw,
        args.global_batch,
        weights=args.model,  # each worker reads what its stage needs
        lr_scheduler=lambda optimizer: get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps),
        clip_grad_norm=1.0,
        precision=args.precision,
        checkpoints=f"{args.export}-checkpoints",
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.export)


if __name__ == "__main__":
    main()
