"""Peak memory of a step over a vocabulary of 150,000 words: Varuna against a plain loop, each in processes of its own.

    python benchmarks/large_vocabulary.py             # all, on the CPU
    python benchmarks/large_vocabulary.py --case varuna --precision bf16 --loss pieces

Bytes are those of tensors that the third step makes (each storage counts until it is freed), in units of the logits in
fp32. ``pieces`` is ``examples/loss_in_pieces.py``, ``linear`` torch's ``linear_cross_entropy`` in chunks.
``last_of_two`` is the last of two stages.
"""

import argparse
import json
import os
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
CASES = ("plain", "varuna", "last_of_two")
LOSSES = ("float", "direct", "pieces", "linear")


class Language(nn.Module):
    """Little but its vocabulary."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.kind = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss: ``float`` as most models of transformers do it, ``direct`` without a copy, or in pieces."""
        x = self.embed(input_ids)
        x = x + torch.tanh(self.layer(x))
        if self.kind == "pieces":
            return loss_in_pieces(x, self.head.weight, labels).sum() / (labels != IGNORED).sum()
        if self.kind == "linear":
            flat, options = x.flatten(0, 1), nn.LinearCrossEntropyOptions()
            return nn.functional.linear_cross_entropy(flat, self.head.weight, labels.flatten(), options=options)
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


def measured(case: str, precision: str, loss: str) -> str:
    """Peak of one case, in fresh processes."""
    two = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if case == "last_of_two" else []
    command = [sys.executable, *two, __file__, "--case", case, "--precision", precision, "--loss", loss]
    environment = {**os.environ, "VARUNA_STAGES": "2"} if two else None
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return f"{json.loads(told[-1])['logits']:.2f}" if done.returncode == 0 and told else "failed"


def main() -> None:
    """Measure one case, or all and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--loss", choices=LOSSES, default="float")
    args = parser.parse_args()
    if args.case is not None:
        torch.set_num_threads(1)
        found, peak = (plain if args.case == "plain" else ours)(args.precision, args.loss)
        if os.environ.get("RANK") == "0":
            return  # the first stage of two
        print(json.dumps({"loss": found, "peak_bytes": peak, "logits": peak / LOGITS_BYTES}))
        return
    print(f"peak bytes of a step, in units of {LOGITS_BYTES / 1e6:.0f} MB: the logits of a micro-batch in fp32")
    for precision in DTYPES:
        for loss in LOSSES:
            row = "  ".join(f"{case} {measured(case, precision, loss)}" for case in CASES)
            print(f"{precision}  {loss:8}  {row}", flush=True)


if __name__ == "__main__":
    main()
