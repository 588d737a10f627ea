"""BERT learns to fill in masked bytes of Python's own manual.

python examples/gallery/bert_masked.py                    one process
varuna run --workers 2 examples/gallery/bert_masked.py    two workers, the same losses
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import varuna

MASK, IGNORED = 256, -100


class Masked(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pieces of the text in which 15 % of the bytes are to be guessed; others in each epoch."""

    def __init__(self, length: int) -> None:
        text = bytearray("\n".join(topics.values()).encode())
        self.windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index].long()
        draw = torch.rand(len(tokens))  # Varuna seeds it by epoch and sample, so each worker would draw the same
        chosen = draw < 0.15
        masked = torch.where(draw < 0.12, MASK, tokens)  # 80 % of them
        masked = torch.where((draw >= 0.12) & (draw < 0.135), torch.randint(256, tokens.shape), masked)  # 10 %
        return {"input_ids": masked, "labels": torch.where(chosen, tokens, IGNORED)}


def build(layers: int, width: int, length: int) -> nn.Module:
    config = BertConfig(
        vocab_size=257,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    return BertForMaskedLM(config)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="BERT's masked language model on bytes.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: build(args.layers, args.width, args.length),
        Masked(args.length),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        global_batch=args.global_batch,
        micro_batch=8,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20),
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
