"""Seconds of a step with and without compression, for some plans over narrow lines; losses must be the same bits.

    python -m benchmarks.compressed_plans [--line 100] [--width 65536] [--plans 2x1 1x2 2x2] [--rounds 3] [--steps 16]

Every worker lives on a host of its own, a network namespace whose line `tc` makes narrow in both directions (0: as wide
as it is). Sections sleep in place of computing; what crosses is noise with a normal distribution, in bf16, and sums of
gradients in fp32. Both sides run in turns, each in new processes; a side's figure is the median of the steps after the
first quarter. The last line is JSON. Needs root, ip, tc, unshare and nsenter.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from contextlib import closing
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import varuna
from benchmarks.accuracy_job import Layer
from benchmarks.emulated.hosts import Hosts
from benchmarks.emulated.network import run_on_time
from tests.scenarios.network import why_not

SECTIONS, MICRO_BATCHES, MICRO_BATCH = 4, 16, 2
LIMIT_S = 900.0


class Noise:
    """Rows of normal numbers, a function of the index."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(self.width, generator=torch.Generator().manual_seed(index))}


class Squares(nn.Module):
    """Layers one after another, and the mean of squares: gradients are noise like their activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(SECTIONS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x.float() ** 2).mean()


def worker(width: int, steps: int, told: Path, *, compresses: bool) -> None:
    """Take part; the first one tells what steps took."""
    run_on_time()
    trainer = varuna.Trainer(
        lambda: Squares(width),
        Noise(width),
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-3),
        MICRO_BATCHES * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        precision="bf16",
        cut=[f"layers.{number}" for number in range(1, SECTIONS)],
        network=varuna.Network(compress=compresses),
    )
    times_s, losses, before_s = list[float](), list[str](), time.monotonic()
    for step in trainer.steps(steps):
        now_s = time.monotonic()
        times_s.append(now_s - before_s)
        losses.append(step.loss.hex())
        before_s = now_s
    if os.environ["RANK"] == "0":
        told.write_text(json.dumps({"step_s": median(times_s[steps // 4 :]), "losses": losses}))


def measured(options: argparse.Namespace, plan: str, folder: Path, *, compresses: bool) -> dict[str, Any]:
    """Run once, and return what the run told."""
    stages, replicas = map(int, plan.split("x"))
    os.environ["VARUNA_STAGES"] = str(stages)
    told = folder / "told.json"
    with contextlib.suppress(FileNotFoundError):
        told.unlink()
    with closing(Hosts(stages * replicas, 1, options.line * 1e6 or inf)) as hosts:
        side = ["--compress"] if compresses else []
        hosts.run(
            "benchmarks.compressed_plans", [*sys.argv[1:], *side, "--told", str(told)], stages * replicas, LIMIT_S
        )
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--line", type=float, default=100, metavar="MBIT", help="of every host, in each direction")
    parser.add_argument("--width", type=int, default=65_536, help="4 bytes of a message for each")
    parser.add_argument("--plans", nargs="+", default=["2x1", "1x2", "2x2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--compress", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        worker(options.width, options.steps, options.told, compresses=options.compress)
        return
    if reason := why_not("tc"):
        raise SystemExit(reason)
    found: dict[str, Any] = {"Mb/s": options.line, "message, KB": options.width * MICRO_BATCH * 2 // 1000}
    with tempfile.TemporaryDirectory() as folder:
        for plan in options.plans:
            runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
            for turn in range(options.rounds):
                for on in (turn % 2 == 0, turn % 2 == 1):
                    runs[on].append(measured(options, plan, Path(folder), compresses=on))
                    print(plan, on, f"{runs[on][-1]['step_s']:.3f} s", file=sys.stderr, flush=True)
            losses = {tuple(each["losses"]) for both in runs.values() for each in both}
            ratios = [on["step_s"] / off["step_s"] for on, off in zip(runs[True], runs[False], strict=True)]
            found[plan] = {
                "s without": round(median(each["step_s"] for each in runs[False]), 3),
                "s with": round(median(each["step_s"] for each in runs[True]), 3),
                "with / without": [round(each, 3) for each in sorted(ratios)],
                "losses": "equal, bit by bit" if len(losses) == 1 else "DIFFERENT",
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
