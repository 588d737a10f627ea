"""Continue from a folder of safetensors, on another text: first Python's manual, then its source code.

python examples/gallery/from_safetensors.py --export runs/base                     makes the folder
python examples/gallery/from_safetensors.py --weights runs/base                    one process goes on from it
varuna run --workers 2 examples/gallery/from_safetensors.py --weights runs/base    two workers, the same losses
"""

import logging
import sysconfig
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import varuna

logging.getLogger("transformers").setLevel(logging.ERROR)  # GPT-2 would say that it takes the usual loss


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text in pieces of ``length`` bytes; the model shifts the labels itself."""

    def __init__(self, text: bytes, length: int) -> None:
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index].long()
        return {"input_ids": tokens, "labels": tokens.clone()}


def build(args: Namespace) -> nn.Module:
    """Build a GPT-2 of the folder's shape, or of a new one."""
    if args.weights:
        return GPT2LMHeadModel(GPT2Config.from_pretrained(args.weights))
    heads = max(2, args.width // 64)
    shape: dict[str, Any] = {"n_layer": args.layers, "n_embd": args.width, "n_head": heads, "n_positions": args.length}
    return GPT2LMHeadModel(GPT2Config(**shape, vocab_size=256, bos_token_id=0, eos_token_id=0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Make a folder of safetensors, or continue from one.")
    parser.add_argument(
        "--weights", help="a folder as save_pretrained writes it: each worker reads what its stage needs"
    )
    parser.add_argument("--export", help="write the trained model to this folder")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args(arguments)

    manual = "\n".join(topics.values()).encode()
    code = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    trainer = varuna.Trainer(
        lambda: build(args),
        Windows(code if args.weights else manual, args.length),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch=args.global_batch,
        micro_batch=8,
        weights=args.weights,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")
    if args.export:
        trainer.export(args.export)


if __name__ == "__main__":
    main()
