"""Measure the engine's cost: against a plain loop, against the simulator's ideal pipeline, and per action.

- Step time at P = D = 1 over a plain PyTorch loop: same model, same accumulation, one thread.
- The simulator's ideal for the plan that P = 2 ran, over its step time: the sections' times as `varuna calibrate`
  measures them with two workers at once, links and hand-overs that take no time.
- CPU time of the training thread per action (F, R, B, I or W) with a model of two tiny layers, so nearly all of it is
  the engine's and autograd's own; step ends (reduce, vote, optimizer) are shared out among the actions.

Rounds of all are interleaved, each in fresh processes, so that a noisy machine disturbs all alike; the last line is
JSON.

    python benchmarks/engine_overhead.py [--rounds 3] [--steps 8] [--json]
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from varuna.calibration.fit import assemble
from varuna.calibration.format import Calibration, Link, NetworkCosts, Ring
from varuna.core.plan import Plan
from varuna.engine.base.spans import Span, subscribe
from varuna.measure.collect import collect
from varuna.measure.rendezvous import StoreHost
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.simulator.step import simulate

MICRO_BATCHES = 8
MICRO_BATCH = 2
LENGTH = 128
ACTIONS_BATCH = 128


def build() -> Any:
    """GPT-2, 6 layers of width 256, no dropout."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel

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


def ours(steps: int) -> dict[str, Any] | None:
    """Median seconds of a step of the same job under Varuna, and its plan; None on all ranks but the main one."""
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
    times, last_s, main_plan = [], time.perf_counter(), None
    for step in trainer.steps(steps):
        times.append(time.perf_counter() - last_s)
        last_s = time.perf_counter()
        main_plan = step.plan if step.is_main else None
    return {"value": statistics.median(times[1:]), "plan": main_plan.model_dump_json()} if main_plan else None


class Numbers:
    """Next to nothing to read."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"x": torch.full((4,), float(index % 7))}


def two_layers() -> Any:
    """Next to nothing to compute, in two sections."""
    from torch import Tensor, nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.other(self.one(x)).mean()
            return loss

    return Layers()


def nearly_nothing(steps: int) -> dict[str, Any] | None:
    """CPU microseconds per action of the main rank's training thread."""
    import torch

    import varuna

    trainer = varuna.Trainer(
        two_layers,
        Numbers(),
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-3),
        global_batch=ACTIONS_BATCH,
        micro_batch=1,
        cut=["other"],
    )
    begun: list[str] = []

    def note(span: Span) -> None:
        if span.phase == "begin" and span.name in "FRBIW":
            begun.append(span.name)

    undo = subscribe(note)
    times, last_s, is_main = [], 0.0, False
    for step in trainer.steps(steps + 3):
        times.append(time.thread_time() - last_s)
        if step.index == 0:
            undo()  # counted once: listening is not part of what is measured
        last_s, is_main = time.thread_time(), step.is_main
    return {"value": statistics.median(times[2:]) / len(begun) * 1e6, "actions": len(begun)} if is_main else None


def ideal_s(plan: Plan, calibration: Calibration) -> float:
    """A step of ``plan`` where only sections and the optimizer take time."""
    instant = NetworkCosts(link=Link(latency_s=0.0, bytes_per_s=1e15), rings=(Ring(latency_s=0.0, bytes_per_s=1e15),))
    free = {"action_s": 0.0, "hand_over_s": 0.0, "samples_s": 0.0, "across_vms": instant, "within_vm": None}
    costs = pipeline_costs(profile(calibration.model_copy(update=free), plan.micro_batch), plan, gpus_per_vm=1)
    return simulate(
        costs,
        micro_batches=len(plan.micro_batches_of(0)),
        policy=plan.policy,
        stash_limits=plan.first.stash_limits,
        split_last=plan.first.split_last,
        empties=plan.first.empties,
    ).step_s


def calibrated() -> Calibration:
    """Of this benchmark's job, with both cores busy."""
    store = StoreHost()  # lives as long as it is measured
    return assemble(
        collect(Path(__file__).resolve(), ["--mode", "ours"], workers=2, store=store.address()), name="gpt2"
    )


def measure(mode: str, steps: int) -> dict[str, Any]:
    """Run one mode in fresh processes; returns what its main rank told."""
    script = str(Path(__file__).resolve())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    base, _, suffix = mode.partition("-")
    command = [script, "--mode", base, "--steps", str(steps)]
    if suffix == "two":
        environment["VARUNA_STAGES"] = "2"
        command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *command]
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    if not lines:
        raise SystemExit(f"{mode} failed:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(lines[-1].removeprefix("told "))
    return told


MODES = {"plain": lambda steps: {"value": plain(steps)}, "ours": ours, "actions": nearly_nothing}


def main() -> None:
    """Interleave rounds of all modes and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--mode", choices=tuple(MODES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode:
        told = MODES[options.mode](options.steps)
        if told is not None:
            print("told", json.dumps(told), flush=True)
        return
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        row = {mode: measure(mode, options.steps) for mode in ("plain", "ours", "ours-two", "actions", "actions-two")}
        ideal = ideal_s(Plan.model_validate_json(row["ours-two"]["plan"]), calibrated())
        rows.append(
            {
                "over_plain_loop": row["ours"]["value"] / row["plain"]["value"],
                "two_stages_of_ideal": ideal / row["ours-two"]["value"],
                "us_per_action": row["actions"]["value"],
                "us_per_action_two_stages": row["actions-two"]["value"],
            }
        )
        if not options.json:
            seconds = "  ".join(f"{mode} {row[mode]['value'] * 1000:.0f} ms" for mode in ("plain", "ours", "ours-two"))
            print(f"{seconds}  ideal {ideal * 1000:.0f} ms", *(f"{key} {value:.3g}" for key, value in rows[-1].items()))
    result: dict[str, Any] = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
    print(json.dumps(result | {"rounds": [{key: round(value, 4) for key, value in row.items()} for row in rows]}))


if __name__ == "__main__":
    main()
