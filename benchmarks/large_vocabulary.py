"""Peak memory of a step over a vocabulary of 150,000 words: Varuna against a plain loop, each in a process of its own.

    python benchmarks/large_vocabulary.py             # all, on the CPU
    python benchmarks/large_vocabulary.py --case varuna --precision bf16 --loss pieces

Bytes are those of tensors that the third step makes (each storage counts until it is freed), in units of the logits in
fp32. ``pieces`` is ``examples/loss_in_pieces.py``.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import varuna
from examples.loss_in_pieces import IGNORED, loss_in_pieces
from varuna.partition.watching.live_bytes import Allocated

WORDS, WIDTH, LENGTH, MICRO_BATCH = 150_000, 32, 128, 2
LOGITS_BYTES = MICRO_BATCH * LENGTH * WORDS * 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = ("plain", "varuna")


class Language(nn.Module):
    """Little but its vocabulary."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.kind = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss: ``float`` as most models of transformers do it, ``direct`` without a copy, or ``pieces``."""
        x = self.embed(input_ids)
        x = x + torch.tanh(self.layer(x))
        if self.kind == "pieces":
            return loss_in_pieces(x, self.head.weight, labels).sum() / (labels != IGNORED).sum()
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float() if self.kind == "float" else logits, labels.flatten())


def sample(index: int) -> dict[str, Tensor]:
    """Random words."""
    words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": words, "labels": words.roll(-1)}


def sgd(named: Any) -> torch.optim.Optimizer:
    """An optimizer without state: the head's gradient is large enough."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def plain(precision: str, loss: str) -> tuple[float, int]:
    """Loss of the third step, and peak bytes of it, in a plain loop of two micro-batches."""
    torch.manual_seed(0)
    model = Language(loss).to(DTYPES[precision])
    optimizer, counted, found = sgd(list(model.named_parameters())), Allocated(), 0.0
    for step in range(3):
        watched = Allocated() if step < 2 else counted
        with watched.watch():
            found = 0.0
            optimizer.zero_grad(set_to_none=True)
            for first in range(0, 2 * MICRO_BATCH, MICRO_BATCH):
                rows = [sample(4 * step + first + row) for row in range(MICRO_BATCH)]
                part = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}) / 2
                part.backward()
                found += float(part.detach())
            optimizer.step()
    return found, counted.peak_bytes


def ours(precision: Any, loss: str) -> tuple[float, int]:
    """The same under Varuna."""
    trainer = varuna.Trainer(
        lambda: Language(loss),
        [sample(index) for index in range(12)],
        sgd,
        2 * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        precision=precision,
        device="cpu",
    )
    counted, found = Allocated(), 0.0
    steps = trainer.steps(3)
    next(steps)
    next(steps)
    with counted.watch():
        found = next(steps).loss
    return found, counted.peak_bytes


def main() -> None:
    """Measure one case, or all and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--loss", choices=("float", "direct", "pieces"), default="float")
    args = parser.parse_args()
    if args.case is not None:
        torch.set_num_threads(1)
        found, peak = (plain if args.case == "plain" else ours)(args.precision, args.loss)
        print(json.dumps({"loss": found, "peak_bytes": peak, "logits": peak / LOGITS_BYTES}))
        return
    print(f"peak bytes of a step, in units of {LOGITS_BYTES / 1e6:.0f} MB: the logits of a micro-batch in fp32")
    for precision in DTYPES:
        for loss in ("float", "direct", "pieces"):
            row = []
            for case in CASES:
                flags = ["--case", case, "--precision", precision, "--loss", loss]
                done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=False)
                last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
                row.append(f"{json.loads(last[0])['logits']:.2f}" if last else "failed")
            print(
                f"{precision}  {loss:8}  " + "  ".join(f"{c} {r}" for c, r in zip(CASES, row, strict=True)), flush=True
            )


if __name__ == "__main__":
    main()
