"""T5 learns to summarise: from a docstring of Python's standard library without its first line, that line.

python examples/gallery/t5_summaries.py                    one process
varuna run --workers 2 examples/gallery/t5_summaries.py    two workers, the same losses
"""

import ast
import sysconfig
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import varuna

PAD, END, BYTES, IGNORED = 0, 1, 2, -100


def docstrings(files: int) -> Iterator[tuple[str, str]]:
    """Yield (text, summary) of the functions and classes in the first files of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                summary, _, text = (ast.get_docstring(node) or "").partition("\n\n")
                if text:
                    yield text, summary


def row(text: str, length: int, fill: int) -> Tensor:
    """Return a token for each byte, and one for the end."""
    tokens = [*(BYTES + byte for byte in text.encode()[: length - 1]), END]
    return torch.tensor([*tokens, *[fill] * (length - len(tokens))])


def sample(text: str, summary: str, length: int) -> dict[str, Tensor]:
    tokens = row(text, length, PAD)
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": row(summary, length // 2, IGNORED)}


def build(layers: int, width: int) -> nn.Module:
    config = T5Config(
        vocab_size=BYTES + 256,
        num_layers=layers,
        d_model=width,
        d_kv=32,
        num_heads=max(1, width // 32),
        d_ff=4 * width,
    )
    config.decoder_start_token_id = PAD
    return T5ForConditionalGeneration(config)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="T5 learns the first lines of docstrings.")
    parser.add_argument("--layers", type=int, default=1, help="of the encoder, and of the decoder")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="bytes of a text; half as many of a summary")
    parser.add_argument("--files", type=int, default=60, help="of the standard library")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args(arguments)

    trainer = varuna.Trainer(
        lambda: build(args.layers, args.width),
        [sample(text, summary, args.length) for text, summary in docstrings(args.files)],
        lambda named: torch.optim.AdamW([p for _, p in named], lr=3e-3),
        global_batch=args.global_batch,
        micro_batch=8,
    )
    for step in trainer.steps(args.steps):
        if step.is_main:
            print(f"step {step.index} loss {step.loss:.6f}")


if __name__ == "__main__":
    main()
