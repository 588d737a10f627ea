"""LoRA: adapters of PEFT over a frozen Llama, on Python's own manual. Only the adapters are saved.

python examples/gallery/lora.py                    one process
varuna run --workers 2 examples/gallery/lora.py    two workers, the same losses
"""

import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import varuna

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT asks transformers for it by its old name


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The text in pieces of ``length`` tokens of the base, or bytes; the model shifts the labels itself."""

    def __init__(self, length: int, base: str | None) -> None:
        text = "\n".join(topics.values())
        tokens = AutoTokenizer.from_pretrained(base)(text)["input_ids"] if base else list(text.encode())
        self.windows = torch.tensor(tokens).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index]
        return {"input_ids": tokens, "labels": tokens.clone()}


def build(base: str | None, rank: int) -> nn.Module:
    """Build the model; of a ``base`` only its shape: each worker reads the values of its stage from the files."""
    small: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    config = LlamaConfig.from_pretrained(base) if base else LlamaConfig(vocab_size=256, hidden_size=128, **small)
    lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    adapted: nn.Module = get_peft_model(LlamaForCausalLM(config), lora)
    return adapted


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="LoRA adapters over a frozen Llama.")
    parser.add_argument("--base", help="a folder of safetensors; default: a small Llama with random weights")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--checkpoints", help="save adapters here, and resume from here")
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: build(args.base, args.rank),
        Windows(args.length, args.base),
        lambda named: torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2),
        global_batch=args.global_batch,
        micro_batch=8,
        weights=varuna.Weights(args.base, missing="initialise") if args.base else None,
        checkpoints=varuna.Checkpoints(args.checkpoints, frozen=False) if args.checkpoints else None,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
