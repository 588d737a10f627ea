"""Convergence at a large batch: the same model on real text at M and 16 M examples per step, for equal examples.

The paper (section "Accuracy and Time-to-Convergence") trains GPT-2 2.5B with 16 times the usual mini-batch to the same
loss. Here GPT-2 learns the sources of Python's standard library, byte by byte; validation is on windows that training
never sees. Both runs see the same samples in the same order. The learning rate grows with the square root of the
batch, the usual rule for Adam, from a linear warm-up over the first tenth of the examples and down a cosine to a tenth.
Weights decay, biases and norms do not: groups by name.

    python benchmarks/convergence.py [--examples 8192] [--global-batch 4] [--times 16] [--svg curve.svg]

``--layers``, ``--width``, ``--heads``, ``--length`` and ``--dropout`` size the model; ``--workers N`` runs N ranks
under torchrun. The last line is JSON.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "gpt2_text")]

import torch  # noqa: E402
from model import add_arguments, build_model  # noqa: E402
from text import TextDataset  # noqa: E402
from torch.utils.data import Subset  # noqa: E402

import varuna  # noqa: E402

HELD_OUT = 20
"""One window in so many is for validation."""
WARM_SHARE, FLOOR_SHARE = 0.1, 0.1
WEIGHT_DECAY = 0.1
BOUND_S = 7 * 24 * 3600.0


def groups(named: Any) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    plain = [parameter for name, parameter in named if name.endswith(".bias") or ".ln_" in name]
    kept = {id(parameter) for parameter in plain}
    decayed = [parameter for _, parameter in named if id(parameter) not in kept]
    found = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in found if group["params"]]


def share_of_peak(step: int, steps: int) -> float:
    """Of the largest learning rate: up a line, down a cosine."""
    warm = max(1, round(WARM_SHARE * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return FLOOR_SHARE + (1 - FLOOR_SHARE) * (1 + math.cos(math.pi * done)) / 2


def train(args: argparse.Namespace, global_batch: int) -> None:
    """One run; the main rank prints a line for each point of its curve."""
    text = TextDataset(args.length)
    training = Subset(text, [index for index in range(len(text)) if index % HELD_OUT])
    held_out = Subset(text, [index for index in range(len(text)) if not index % HELD_OUT])
    steps = args.examples // global_batch
    peak = args.learning_rate * math.sqrt(global_batch / args.global_batch)
    trainer = varuna.Trainer(
        model=lambda: build_model(args),
        dataset=training,
        optimizer=lambda named: torch.optim.AdamW(groups(named), lr=peak, betas=(0.9, 0.95)),
        global_batch=global_batch,
        micro_batch=args.micro_batch,
        seed=args.seed,
        clip_grad_norm=1.0,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: share_of_peak(step, steps)),
    )
    marks = {round(steps * point / args.points) for point in range(1, args.points + 1)}
    for step in trainer.steps(steps):
        if step.index + 1 in marks:
            found = trainer.evaluate(held_out, examples=min(args.validation, len(held_out)))
            if step.is_main:
                row = {"examples": (step.index + 1) * global_batch, "validation": found.loss, "training": step.loss}
                print("point", json.dumps(row), flush=True)


def curve(args: argparse.Namespace, global_batch: int) -> list[dict[str, Any]]:
    """Run in processes of its own; the points of its curve."""
    command = [str(Path(__file__).resolve()), *sys.argv[1:], "--run", str(global_batch)]
    if args.workers > 1:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(args.workers), *command]
    done = subprocess.run(
        [sys.executable, *command],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    points = [json.loads(line.removeprefix("point ")) for line in done.stdout.splitlines() if line.startswith("point ")]
    if done.returncode or not points:
        raise SystemExit(f"the run at {global_batch} examples per step failed:\n{done.stderr[-2000:]}")
    return points


WIDTH, HEIGHT, MARGIN = 640, 360, 50


def draw(curves: dict[int, list[dict[str, Any]]]) -> str:
    """Validation perplexity over examples, as SVG; logarithmic upwards."""
    points = [point for each in curves.values() for point in each]
    most = max(point["examples"] for point in points)
    low, high = (choose(point["validation"] for point in points) for choose in (min, max))
    span = max(high - low, 1e-9)

    def place(examples: int, loss: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * examples / most
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / span

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="24">validation perplexity over examples seen</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 20}" text-anchor="end">{most:,} examples</text>',
    ]
    for loss in (low, low + span / 2, high):
        y = place(0, loss)[1]
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{math.exp(loss):.1f}</text>')
    for (batch, each), colour in zip(curves.items(), ("#0072b2", "#d55e00"), strict=True):
        line = [place(point["examples"], point["validation"]) for point in each]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in line]
        row = MARGIN + 16 * list(curves).index(batch)
        parts.append(f'<text x="{WIDTH - MARGIN}" y="{row}" text-anchor="end" fill="{colour}">batch {batch}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Train at both batches and lay their curves side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=8192, help="that each run sees; a multiple of both batches")
    parser.add_argument("--global-batch", type=int, default=4, help="M")
    parser.add_argument("--times", type=int, default=16, help="the large batch is so many times M")
    parser.add_argument("--micro-batch", type=int, help="m; chosen by default")
    parser.add_argument("--points", type=int, default=8, help="of each curve")
    parser.add_argument("--validation", type=int, default=256, help="examples of a point")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="draw the curves here")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    add_arguments(parser)
    parser.set_defaults(layers=3, width=96, heads=3, length=64, dropout=0.0, learning_rate=1e-3)
    args = parser.parse_args()
    large = args.global_batch * args.times
    if args.examples < args.points * large or args.examples % large:
        parser.error(f"--examples must be a multiple of {large}, at least {args.points} times that")
    if args.run:
        train(args, args.run)
        return
    curves = {batch: curve(args, batch) for batch in (args.global_batch, large)}
    if args.svg:
        args.svg.write_text(draw(curves))
    small_curve, large_curve = curves.values()
    if not args.json:
        print(f"{'examples':>10}  {f'perplexity at {args.global_batch}':>18}  {f'perplexity at {large}':>18}")
        for one, other in zip(small_curve, large_curve, strict=True):
            values = (math.exp(point["validation"]) for point in (one, other))
            print(f"{one['examples']:>10,}  " + "  ".join(f"{value:>18.3f}" for value in values))
    ends = [math.exp(each[-1]["validation"]) for each in curves.values()]
    result = {
        "global_batches": list(curves),
        "examples": args.examples,
        "perplexities": [round(value, 4) for value in ends],
        "large_over_small": round(ends[1] / ends[0], 4),
        "curves": {str(batch): [round(point["validation"], 4) for point in each] for batch, each in curves.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
