"""Step time of Varuna at P = D = 1 over a plain PyTorch loop, and at P = 2 over the ideal pipeline.

Both run the same model with the same accumulation and one thread. Rounds of either are interleaved, each in
fresh processes, so that a noisy machine disturbs both alike; the last line is JSON.

    python benchmarks/engine_overhead.py [--rounds 5] [--steps 8] [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MICRO_BATCHES = 8
MICRO_BATCH = 2
LENGTH = 128


def build() -> Any:
    """GPT-2, 6 layers of width 256, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=6,
            n_embd=256,
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


class Tokens:
    """Random tokens, a function of the index."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def plain(steps: int) -> float:
    """Median seconds of a step of an ordinary loop with gradient accumulation."""
    import torch

    torch.set_num_threads(1)
    model, data = build().train(), Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times = []
    for step in range(steps):
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            first = (step * MICRO_BATCHES + micro_batch) * MICRO_BATCH
            samples = [data[i % len(data)] for i in range(first, first + MICRO_BATCH)]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            (model(**batch).loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])


def ours(steps: int) -> float | None:
    """Median seconds of a step of the same job under Varuna; None on all ranks but the main one."""
    import torch

    import varuna

    trainer = varuna.Trainer(
        build,
        Tokens(),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
        global_batch=MICRO_BATCHES * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
        clip_grad_norm=1.0,
    )
    times, last_s, is_main = [], time.perf_counter(), False
    for step in trainer.steps(steps):
        times.append(time.perf_counter() - last_s)
        last_s = time.perf_counter()
        is_main = step.is_main
    return statistics.median(times[1:]) if is_main else None


def measure(mode: str, steps: int) -> float:
    """Run one mode in fresh processes; returns its median step time."""
    script = str(Path(__file__).resolve())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, "--mode", mode, "--steps", str(steps)]
    if mode == "two":
        environment["VARUNA_STAGES"] = "2"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*launcher, script, "--mode", "ours", "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("step_s ")]
    if not lines:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-2000:]}")
    return float(lines[-1].split()[1])


def main() -> None:
    """Interleave rounds of all modes and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--mode", choices=("plain", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        seconds = plain(options.steps) if options.mode == "plain" else ours(options.steps)
        if seconds is not None:
            print("step_s", seconds, flush=True)
        return
    rounds = [{mode: measure(mode, options.steps) for mode in ("plain", "ours", "two")} for _ in range(options.rounds)]
    overhead = [each["ours"] / each["plain"] for each in rounds]
    # Two equal stages, the last without recompute: the first does F, R, B = 4 of the 3 units that a stage without
    # recompute does. Ideal: the pipeline fills in one F and drains in one B of a stage.
    forward_s = [each["ours"] / MICRO_BATCHES / 3 / 2 for each in rounds]
    ideal = [(4 * MICRO_BATCHES + 1) * unit for unit in forward_s]
    pipeline = [each["two"] / best for each, best in zip(rounds, ideal, strict=True)]
    if not options.json:
        for each in rounds:
            print("  ".join(f"{mode} {seconds * 1000:.0f} ms" for mode, seconds in each.items()))
    result = {
        "over_plain_loop": round(statistics.median(overhead), 4),
        "over_plain_loop_rounds": [round(value, 4) for value in overhead],
        "two_stages_over_ideal": round(statistics.median(pipeline), 4),
        "two_stages_over_ideal_rounds": [round(value, 4) for value in pipeline],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
