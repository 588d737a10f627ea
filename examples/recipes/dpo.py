"""Direct preference optimization with LoRA: the reference is the same model without its adapters, in the same forward.

varuna run -n 3 examples/recipes/dpo.py --model Llama-3.1-8B-Instruct --data pairs.jsonl
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM

import varuna
from varuna.integrations.pretrained import Pairs, adapted, beside_base, config_of, tokenizer_of, weights_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="DPO with LoRA on pairs of answers.")
    parser.add_argument("--model", required=True, help="a folder of safetensors")
    parser.add_argument("--data", required=True, help="a file with prompt, chosen and rejected on each line")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="tokens of prompt and answer")
    parser.add_argument("--global-batch", type=int, default=32, help="pairs")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--adapter", default="adapter", help="the folder for the trained adapter")
    args = parser.parse_args(arguments)

    config = config_of(args.model, AutoModelForCausalLM)
    pairs = Pairs(args.data, tokenizer_of(args.model), args.length)
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")

    def base() -> Any:
        return AutoModelForCausalLM.from_config(config)

    def loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        targets = torch.cat([batch["labels"], batch["labels"]], 1).flatten(0, 1)[:, 1:]
        odds = -cross_entropy(output.logits[:, :-1].float().mT, targets, reduction="none").sum(1)  # of masked ones 0
        better, worse, base_better, base_worse = odds.unflatten(0, (-1, 4)).unbind(1)
        return -logsigmoid(args.beta * (better - worse - base_better + base_worse)).mean()

    trainer = varuna.Trainer(
        lambda: beside_base(adapted(base(), lora), rows=2),
        pairs,
        lambda named: torch.optim.AdamW([each for _, each in named if each.requires_grad], lr=args.lr),
        args.global_batch,
        loss=loss,
        weights=weights_of(args.model, base),  # each worker reads what its stage needs
        checkpoints=varuna.Checkpoints(f"{args.adapter}-checkpoints", frozen=False),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    trainer.export(args.adapter)


if __name__ == "__main__":
    main()
