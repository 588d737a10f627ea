"""Measures the cost of copies of each stage's state on another worker: steps with copies over steps without.

Two worker processes of `varuna run` train GPT-2 in two stages (P = 2, D = 1), so that each keeps a copy of the other
one's state. Within one run, blocks of steps with copies alternate with blocks without and with a second kind without,
whose ratio is the noise. Wall time is that of a step on the main rank; CPU time is that of all threads of both
workers, which a busy machine disturbs less. Means are compared, since most steps begin no copy.

    python -m benchmarks.copy_cost [--width 512] [--micro-batches 4] [--blocks 8] [--steps 40] [--json]

A block must be long enough for several copies.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LENGTH, LAYERS, WORKERS = 128, 6, 2
MODES = ("without", "with", "again without")


def _model(width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=LAYERS,
            n_embd=width,
            n_head=8,
            vocab_size=512,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def train(options: argparse.Namespace) -> None:
    """A worker: run blocks of steps in turn, and write down what each step took."""
    import torch

    import varuna
    from benchmarks.engine_overhead import Tokens
    from varuna.engine.copies.memory_checkpoints import CheckpointMaker

    mode, flags, made = [MODES[0]], CheckpointMaker.flags, [0]

    def flags_in_mode(maker: CheckpointMaker) -> dict[str, float]:
        said = flags(maker)
        keeps = said["keep"] * (mode[0] == "with")
        made[0] += bool(keeps)
        return said | {"keep": keeps}

    setattr(CheckpointMaker, "flags", flags_in_mode)  # noqa: B010 - mypy takes no assignment to a method
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in MODES}
    trainer = varuna.Trainer(
        lambda: _model(options.width),
        Tokens(),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-4),
        global_batch=options.micro_batches,
        micro_batch=1,
    )
    size_bytes = 3 * 4 * sum(parameter.numel() for parameter in _model(options.width).parameters())
    is_main, last = False, (time.monotonic(), time.process_time())
    for step in trainer.steps((options.blocks + 1) * len(MODES) * options.steps):
        now, is_main = (time.monotonic(), time.process_time()), step.is_main
        block, within = divmod(step.index, options.steps)
        if block >= len(MODES) and within:  # the first round warms up, and the first step of a block changes modes
            found[MODES[block % len(MODES)]].append((now[0] - last[0], now[1] - last[1]))
        if within == options.steps - 1:
            mode[0] = MODES[(block + 1) % len(MODES)]
            made[0] *= block >= len(MODES)
        last = now
    told = {"main": is_main, "state_bytes": size_bytes, "steps": found, "made": made[0]}
    (Path(options.folder) / f"{os.getpid()}.json").write_text(json.dumps(told))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run it, and compare means."""
    with tempfile.TemporaryDirectory(prefix="varuna-copy-cost-") as folder:
        arguments = ["--folder", folder]
        for name in ("width", "micro_batches", "blocks", "steps"):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        subprocess.run(
            [
                *(sys.executable, "-m", "varuna", "run", "--workers", str(WORKERS), "--stages", str(WORKERS)),
                *(str(Path(__file__).resolve()), *arguments),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        workers = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    main = next(worker for worker in workers if worker["main"])
    mean = statistics.fmean
    wall_s = {mode: mean(wall for wall, _ in main["steps"][mode]) for mode in MODES}
    cpu_s = {mode: sum(mean(cpu for _, cpu in worker["steps"][mode]) for worker in workers) for mode in MODES}
    copies_s = (cpu_s["with"] - cpu_s["without"]) * options.blocks * options.steps
    per_gb = copies_s / max(1, main["made"]) / (main["state_bytes"] / 1e9)
    return {
        "state_mb": round(main["state_bytes"] / 1e6),
        "micro_batches": options.micro_batches,
        "step_s": round(wall_s["without"], 3),
        "step_with_over_without": round(wall_s["with"] / wall_s["without"], 4),
        "step_without_over_without": round(wall_s["again without"] / wall_s["without"], 4),
        "cpu_with_over_without": round(cpu_s["with"] / cpu_s["without"], 4),
        "cpu_without_over_without": round(cpu_s["again without"] / cpu_s["without"], 4),
        "checkpoints": main["made"],
        "cpu_s_per_gb": round(per_gb, 3),
    }


def main() -> None:
    """Print ratios of means."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=8, help="of each kind")
    parser.add_argument("--steps", type=int, default=40, help="in a block")
    parser.add_argument("--folder", help="where a worker writes; not for people")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    if options.folder:
        train(options)
        return
    told = measure(options)
    if not options.json:
        print(f"{told['state_mb']} MB of state are copied, in steps of {told['step_s']} s")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
