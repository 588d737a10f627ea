"""A mixture of experts on chats: LoRA on its attention, with the balancing loss of its routers.

varuna run -n 3 examples/recipes/moe.py --model Qwen3-30B-A3B --data chats.jsonl
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import varuna
from varuna.integrations.pretrained import Chats, adapted, config_of, tokenizer_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="LoRA of a mixture of experts on chats.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help='a file with {"messages": [...]} on each line')
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=1, help="rows over which the experts are balanced")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--adapter", default="adapter", help="the folder for the trained adapter")
    args = parser.parse_args(arguments)

    config = config_of(args.model, AutoModelForCausalLM)
    config.output_router_logits = True  # the model's loss then has its balancing loss
    rows = Chats(args.data, tokenizer_of(args.model), args.length)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules=attention)

    def adamw(named: Sequence[tuple[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for _, each in named if each.requires_grad], lr=args.lr)

    trainer = varuna.Trainer(
        lambda: adapted(AutoModelForCausalLM.from_pretrained(args.model, config=config), lora),
        rows,
        adamw,
        args.global_batch,
        micro_batch=args.micro_batch,
        loss=varuna.Loss(per_micro_batch=True),  # balance within each micro-batch, the same in any plan
        checkpoints=varuna.Checkpoints(f"{args.adapter}-checkpoints", frozen=False),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.adapter)


if __name__ == "__main__":
    main()
