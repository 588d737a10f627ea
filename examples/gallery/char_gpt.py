"""A character-level GPT in plain PyTorch, on Python's own manual.

python examples/gallery/char_gpt.py                    one process
varuna run --workers 2 examples/gallery/char_gpt.py    two workers, the same losses
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varuna


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The windows of the text, each with what follows each of its bytes."""

    def __init__(self, length: int) -> None:
        text = bytearray("\n".join(topics.values()).encode())
        self.windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, length + 1, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index].long()
        return {"tokens": window[:-1], "targets": window[1:]}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + cast(Tensor, self.drop(self.mlp(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, max(1, width // 64)) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: GPT(args.layers, args.width, args.length),
        Windows(args.length),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch=args.global_batch,
        micro_batch=8,
        clip_grad_norm=1.0,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
