"""Convergence at a large batch: the same model on real text at M and 16 M examples per step, for equal examples.

The paper (section "Accuracy and Time-to-Convergence") trains GPT-2 2.5B with 16 times the usual mini-batch to the same
perplexity. Here GPT-2 learns the sources of Python's standard library, byte by byte. Both batches see the same samples
in the same order and are tuned alike: each tries so many learning rates, and the best of them on windows kept for that
gives its curve, on windows that neither training nor tuning sees. The rates begin with ``--learning-rate`` times the
square root of how much larger the batch is, the usual rule for Adam, and double. They rise over the first tenth of the
steps and fall on a line to zero. Adam's second moments remember as many examples at both batches.

    python benchmarks/convergence.py [--examples 65536] [--global-batch 4] [--times 16] [--tries 4] [--keep runs.jsonl]
        [--svg curve.svg]

``--layers``, ``--width``, ``--heads``, ``--length`` and ``--dropout`` size the model; ``--workers N`` runs N ranks
under torchrun, with ``VARUNA_STAGES`` stages. With ``--keep`` the same command repeats no finished run. The last line
is JSON.
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

WARM_SHARE = 0.1
SECOND_MOMENT = 0.95
"""Adam's second beta at the large batch; at M its 16th root, which forgets as much per example."""
BOUND_S = 7 * 24 * 3600.0


def share_of_peak(step: int, steps: int) -> float:
    """Of the largest learning rate: up a line, and down another to zero."""
    warm = max(1, round(WARM_SHARE * steps))
    return (step + 1) / warm if step < warm else (steps - step) / (steps - warm + 1)


def split(text: TextDataset, held_out: int) -> tuple[Subset[Any], Subset[Any], Subset[Any]]:
    """Windows to train on, ``held_out`` to tune by and ``held_out`` for the curve, both from all over the text."""
    every = len(text) // held_out
    kinds = [index % every for index in range(every * held_out)]
    tuning, curve = ([index for index, kind in enumerate(kinds) if kind == chosen] for chosen in (every // 2, 0))
    training = [index for index, kind in enumerate(kinds) if kind not in (every // 2, 0)]
    return Subset(text, training), Subset(text, tuning), Subset(text, curve)


def train(args: argparse.Namespace) -> None:
    """One run, of ``args.only``'s batch and ``args.learning_rate``; the main rank prints its curve as it comes."""
    training, tuning, held_out = split(TextDataset(args.length), args.validation)
    batch = args.only
    steps = args.examples // batch
    betas = (0.9, SECOND_MOMENT ** (batch / (args.global_batch * args.times)))
    trainer = varuna.Trainer(
        model=lambda: build_model(args),
        dataset=training,
        optimizer=lambda named: torch.optim.Adam([each for _, each in named], lr=args.learning_rate, betas=betas),
        global_batch=batch,
        micro_batch=min(args.micro_batch, batch),
        seed=args.seed,
        clip_grad_norm=1.0,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: share_of_peak(step, steps)),
    )
    marks = {round(steps * point / args.points) for point in range(1, args.points + 1)}
    for step in trainer.steps(steps):
        if step.index + 1 in marks:
            found = trainer.evaluate(held_out)
            if step.is_main:
                row = {"examples": (step.index + 1) * batch, "loss": found.loss, "training": step.loss}
                print("point", json.dumps(row), flush=True)
    tuned = trainer.evaluate(tuning)
    if step.is_main:
        print("tuning", json.dumps(tuned.loss), flush=True)


def run(args: argparse.Namespace, batch: int, rate: float) -> dict[str, Any]:
    """A run in processes of its own, or as kept: its curve, and its loss on the windows to tune by."""
    given = {name: value for name, value in vars(args).items() if name not in ("keep", "svg", "tries", "only")}
    setting = {**given, "batch": batch, "learning_rate": rate, "stages": os.environ.get("VARUNA_STAGES")}
    for line in args.keep.read_text().splitlines() if args.keep and args.keep.exists() else ():
        kept = json.loads(line)
        if kept["setting"] == setting:
            return dict(kept)
    command = [str(Path(__file__).resolve()), *sys.argv[1:], "--only", str(batch), "--learning-rate", repr(rate)]
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
    said = [line.split(" ", 1) for line in done.stdout.splitlines()]
    points = [json.loads(rest[0]) for word, *rest in said if word == "point"]
    tuned = [json.loads(rest[0]) for word, *rest in said if word == "tuning"]
    if done.returncode or not tuned:
        raise SystemExit(f"the run at {batch} examples per step failed:\n{done.stderr[-2000:]}")
    found = {"setting": setting, "points": points, "tuning": tuned[0]}
    if args.keep:
        with args.keep.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return found


def tune(args: argparse.Namespace, batch: int) -> list[dict[str, Any]]:
    """Runs of one batch size, the best on the windows to tune by first."""
    lowest = args.learning_rate * math.sqrt(batch / args.global_batch)
    runs = []
    for doublings in range(args.tries):
        found = run(args, batch, lowest * 2**doublings)
        runs.append(found)
        rate, tuned, loss = found["setting"]["learning_rate"], found["tuning"], found["points"][-1]["loss"]
        perplexities = f"{math.exp(tuned):.4f} to tune by, {math.exp(loss):.4f} at the end of the curve"
        print(f"batch {batch}, learning rate {rate:g}: perplexity {perplexities}", flush=True)
    # a run that diverged has no loss
    return sorted(runs, key=lambda each: each["tuning"] if math.isfinite(each["tuning"]) else math.inf)


WIDTH, HEIGHT, MARGIN = 640, 380, 56
TICKS = tuple(step * 10**power for power in range(5) for step in (1, 1.5, 2, 3, 4, 5, 6, 8))
"""Perplexities that may get a line, if a curve comes by."""


def draw(curves: dict[int, list[dict[str, Any]]]) -> str:
    """Validation perplexity over examples, as SVG; logarithmic upwards."""
    points = [point for each in curves.values() for point in each]
    most = max(point["examples"] for point in points)
    low, high = (choose(point["loss"] for point in points) for choose in (min, max))
    low, high = low - 0.03 * (high - low + 1), high + 0.03 * (high - low + 1)

    def place(examples: float, loss: float) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * examples / most
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="30" font-size="15">Validation perplexity (logarithmic) over examples seen</text>',
    ]
    for loss in (math.log(tick) for tick in TICKS if low <= math.log(tick) <= high):
        y = place(0, loss)[1]
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{math.exp(loss):g}</text>')
    for quarter in range(5):
        x = place(most * quarter / 4, low)[0]
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{most * quarter // 4:,}</text>'
        )
    for number, ((batch, each), colour) in enumerate(zip(curves.items(), ("#0072b2", "#d55e00"), strict=True)):
        line = [place(point["examples"], point["loss"]) for point in each]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in line]
        said = f"{batch} examples per step: {math.exp(each[-1]['loss']):.2f} at the end"
        y = MARGIN + 18 * (number + 1)
        over = 'text-anchor="end" paint-order="stroke" stroke="white" stroke-width="8"'  # lines end beside it
        parts.append(f'<text x="{WIDTH - MARGIN}" y="{y}" {over} fill="{colour}">{said}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Tune both batches alike and lay their curves side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=65536, help="that each run sees; a multiple of both batches")
    parser.add_argument("--global-batch", type=int, default=4, help="M")
    parser.add_argument("--times", type=int, default=16, help="the large batch is so many times M")
    parser.add_argument("--micro-batch", type=int, default=16, help="m, or M if that is less")
    parser.add_argument("--tries", type=int, default=4, help="learning rates that each batch tries, from the lowest up")
    parser.add_argument("--points", type=int, default=16, help="of each curve")
    parser.add_argument("--validation", type=int, default=2048, help="examples to tune by, and as many for the curve")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep finished runs here, and do not repeat them")
    parser.add_argument("--svg", type=Path, help="draw the curves here")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    add_arguments(parser)
    parser.set_defaults(layers=2, width=64, heads=2, length=32, dropout=0.0, learning_rate=1e-3)
    args = parser.parse_args()
    large = args.global_batch * args.times
    if args.examples < args.points * large or args.examples % large:
        parser.error(f"--examples must be a multiple of {large}, at least {args.points} times that")
    if args.only:
        train(args)
        return
    tuned = {batch: tune(args, batch) for batch in (args.global_batch, large)}
    curves = {batch: runs[0]["points"] for batch, runs in tuned.items()}
    if args.svg:
        args.svg.write_text(draw(curves))
    print(f"{'examples':>10}  {f'perplexity at {args.global_batch}':>18}  {f'perplexity at {large}':>18}")
    for rows in zip(*curves.values(), strict=True):
        print(f"{rows[0]['examples']:>10,}  " + "  ".join(f"{math.exp(row['loss']):>18.3f}" for row in rows))
    ends = [math.exp(each[-1]["loss"]) for each in curves.values()]
    result = {
        "global_batches": list(curves),
        "examples": args.examples,
        "learning_rates": [runs[0]["setting"]["learning_rate"] for runs in tuned.values()],
        "perplexities": [round(value, 4) for value in ends],
        "large_over_small": round(ends[1] / ends[0], 4),
        "curves": {str(batch): [round(point["loss"], 4) for point in each] for batch, each in curves.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
