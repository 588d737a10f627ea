"""Supervised fine-tuning on chats with LoRA, or with QLoRA: the loss counts answers only, and chats share rows.

varuna run -n 3 examples/recipes/sft.py --model Llama-3.1-8B-Instruct --data chats.jsonl
varuna run -n 3 examples/recipes/sft.py --model Llama-3.1-8B-Instruct --data chats.jsonl --bits 4
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import varuna
from varuna.integrations.pretrained import Chats, adapted, config_of, tokenizer_of, weights_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="LoRA or QLoRA of a causal language model on chats.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help='a file with {"messages": [...]} on each line')
    parser.add_argument("--bits", type=int, choices=(4, 16), default=16, help="4: QLoRA, with bitsandbytes")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--adapter", default="adapter", help="the folder for the trained adapter")
    args = parser.parse_args(arguments)

    config = config_of(args.model, AutoModelForCausalLM)
    rows = Chats(args.data, tokenizer_of(args.model), args.length)
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")

    def adamw(named: Sequence[tuple[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for _, each in named if each.requires_grad], lr=args.lr)

    def base() -> Any:
        return AutoModelForCausalLM.from_config(config)

    saved = varuna.Checkpoints(f"{args.adapter}-checkpoints", frozen=False)
    if args.bits == 4:
        torch.manual_seed(0)  # the adapters begin with the same values on all workers
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=config.dtype)
        read = AutoModelForCausalLM.from_pretrained(args.model, config=config, quantization_config=nf4)
        model = adapted(prepare_model_for_kbit_training(read, use_gradient_checkpointing=False), lora).train()
        optimizer = adamw(list(model.named_parameters()))
        trainer = varuna.Trainer(model, rows, optimizer, args.global_batch, checkpoints=saved)
    else:
        weights = weights_of(args.model, base)  # each worker reads what its stage needs
        trainer = varuna.Trainer(
            lambda: adapted(base(), lora), rows, adamw, args.global_batch, weights=weights, checkpoints=saved
        )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.adapter)


if __name__ == "__main__":
    main()
