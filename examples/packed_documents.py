"""Documents of all lengths, packed into rows of one length: hardly any padding, and no token sees another document.

Try: python examples/packed_documents.py, or: varuna run --workers 2 examples/packed_documents.py
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import varuna

LENGTH = 64
IGNORED = -100


def build_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def pack(documents: Sequence[Tensor], length: int) -> list[list[Tensor]]:
    """Pack documents into rows of at most ``length`` tokens; the longest first, each into the first row with room."""
    rows: list[list[Tensor]] = []
    for document in sorted(documents, key=len, reverse=True):
        row = next((row for row in rows if sum(map(len, row)) + len(document) <= length), None)
        if row is None:
            rows.append([document])
        else:
            row.append(document)
    return rows


class Packed:
    """Rows as a model of transformers takes them. The mask has ``length`` x ``length`` numbers per row."""

    def __init__(self, rows: Sequence[Sequence[Tensor]], length: int) -> None:
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        rest = self.length - sum(map(len, row))
        parts = [*row, torch.zeros(rest, dtype=torch.long)] if rest else [*row]
        tokens = torch.cat(parts)
        labels = tokens.clone()
        labels[self.length - rest :] = IGNORED
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0)[:-1]
        labels[starts] = IGNORED  # the last token of a document does not predict the first of the next
        owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
        sees = (owner[:, None] == owner[None, :]).tril()
        return {
            "input_ids": tokens,
            "position_ids": torch.cat([torch.arange(len(part)) for part in parts]),
            "attention_mask": torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None],
            "labels": labels,
        }


def some_documents(count: int) -> list[Tensor]:
    """Return sequences that count upwards from a random number, of 3 to ``LENGTH`` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, LENGTH, (count,), generator=generator)
    firsts = torch.randint(0, 256, (count,), generator=generator)
    return [(int(first) + torch.arange(int(length))) % 256 for first, length in zip(firsts, lengths, strict=True)]


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=3e-3)


def main() -> None:
    rows = pack(some_documents(400), LENGTH)
    trainer = varuna.Trainer(build_model, Packed(rows, LENGTH), adamw, global_batch=16)
    for step in trainer.steps(60):
        if step.is_main and step.index % 10 == 9:
            print(f"step {step.index + 1}: loss {step.loss:.4f}, {step.targets:.0f} targets in {step.examples} rows")


if __name__ == "__main__":
    main()
