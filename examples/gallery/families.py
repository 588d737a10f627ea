"""GPT-2, Llama or Qwen-MoE of Hugging Face, unmodified, on Python's own manual.

python examples/gallery/families.py --family llama                    one process
varuna run --workers 2 examples/gallery/families.py --family llama    two workers, the same losses
"""

import logging
from argparse import ArgumentParser
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import varuna

logging.getLogger("transformers").setLevel(logging.ERROR)  # GPT-2 would say that it takes the usual loss


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The text in pieces of ``length`` bytes; the models shift the labels themselves."""

    def __init__(self, length: int) -> None:
        text = bytearray("\n".join(topics.values()).encode())
        self.windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index].long()
        return {"input_ids": tokens, "labels": tokens.clone()}


def build(family: str, layers: int, width: int, length: int) -> nn.Module:
    heads = max(2, width // 64)
    ends: dict[str, Any] = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**ends, n_layer=layers, n_embd=width, n_head=heads, n_positions=length))
    shape: dict[str, Any] = {
        **ends,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "max_position_embeddings": length,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=4 * width))
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, output_router_logits=True))  # with a balancing loss


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="GPT-2, Llama or Qwen-MoE on Python's own manual.")
    parser.add_argument("--family", choices=["gpt2", "llama", "qwen-moe"], default="gpt2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: build(args.family, args.layers, args.width, args.length),
        Windows(args.length),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch=args.global_batch,
        micro_batch=8,
        # Experts are balanced over the tokens of 8 examples, whatever the number of workers.
        loss=varuna.Loss(per_micro_batch=True) if args.family == "qwen-moe" else None,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
