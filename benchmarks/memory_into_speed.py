"""Measure the worth of memory: step time of `adaptive`, which keeps the activations that fit, over that of `varuna`.

    python benchmarks/memory_into_speed.py            # simulated: shares of activations from none to all
    python benchmarks/memory_into_speed.py --real     # measured: none, and 80 %, over processes of this machine

Both policies get the same workers with the same memory, and the planner makes the plan of each. A share is that of
the activations of all micro-batches in flight, on the stages that otherwise recompute. With little memory ``varuna`` is
slower, too, since few micro-batches are in flight: what ``adaptive`` makes of memory is seen against a ``varuna`` that
has plenty. Measured runs train GPT-2 with real compute; with more stages than cores, the cores' work is what is
compared. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from varuna.calibration.format import Calibrations
from varuna.core.devices import equal_workers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine_overhead import LENGTH, Tokens
from benchmarks.forked import run_ranks

MICRO_BATCH = 2
_PLENTY_BYTES = 1 << 40


def build(layers: int) -> Any:
    """GPT-2 of width 256."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": 256, "n_head": 8, "vocab_size": 512, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def spec_of(layers: int, micro_batches: int) -> Any:
    """The job that is planned, and measured."""
    import torch

    from varuna.job.spec import JobSpec

    return JobSpec(
        partial(build, layers),
        Tokens(),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
        global_batch=micro_batches * MICRO_BATCH,
        micro_batch=MICRO_BATCH,
    )


class Planning:
    """Plans of both policies for workers of any memory."""

    def __init__(self, layers: int, stages: int, micro_batches: int) -> None:
        from varuna.calibration.nominal import nominal_calibration

        self.spec = spec_of(layers, micro_batches)
        self.facts = self.spec.partitioned.facts
        self.calibration = nominal_calibration(self.facts)
        self.stages, self.micro_batches = stages, micro_batches

    def plan(self, policy: str, memory_bytes: int) -> Any:
        """The planner's choice for P = ``stages``; None if nothing fits."""
        from varuna.core.errors import NoPlanError
        from varuna.planner.asking.request import PlanRequest
        from varuna.planner.choose import best_plan

        request = PlanRequest(
            calibrations=Calibrations.of_one(self.calibration),
            workers=equal_workers(self.stages),
            stages=self.stages,
            global_batch=self.micro_batches * MICRO_BATCH,
            micro_batch=MICRO_BATCH,
            memory_bytes=memory_bytes,
            policy=policy,
        )
        try:
            return best_plan(request)
        except NoPlanError:
            return None

    def share(self, plan: Any) -> float:
        """Of the activations in flight on all stages but the last, which has its B right after its F, those kept."""
        if plan is None:
            return -1.0
        kept_bytes = whole_bytes = 0
        for k in range(plan.stages - 1):
            kept = plan.first.kept_sections_of(k)
            for section in plan.first.sections_of(k):
                in_flight_bytes = plan.first.stash_limits[k] * self.facts.sections[section].activation_bytes
                whole_bytes += in_flight_bytes
                kept_bytes += in_flight_bytes if section in kept else 0
        return kept_bytes / whole_bytes

    def memory_for(self, share: float) -> int:
        """Least bytes of a worker, to 1 %, with which ``varuna`` fits and ``adaptive`` keeps at least ``share``.

        With more memory the share may be smaller again, of more micro-batches in flight.
        """
        memory_bytes = 1 << 24
        while self.plan("varuna", memory_bytes) is None or self.share(self.plan("adaptive", memory_bytes)) < share:
            memory_bytes += memory_bytes // 100
        return memory_bytes

    def run(self, plan: Any, steps: int) -> float:
        """Median seconds of a step of ``plan`` in fresh processes, one per rank."""
        from benchmarks.timed import step_times
        from varuna.job.start import open_session
        from varuna.membership.static import StaticMembership, world_from_environment

        def rank() -> float:
            membership = StaticMembership(world_from_environment(), lambda *_: plan)
            session = open_session(self.spec, steps + 2, membership)
            return statistics.median(
                list(step_times(session))[2:]
            )  # the first step is applied on copies, and kernels warm up

        median_s: float = run_ranks(plan.stages, rank)
        return median_s


def simulated(planning: Planning) -> dict[str, Any]:
    """Speed of ``adaptive`` over ``varuna``, and over one that has plenty of memory, by share."""
    speedups, gains, most = {}, {}, planning.plan("varuna", _PLENTY_BYTES)
    for percent in (0, 20, 40, 60, 80, 100):
        memory_bytes = planning.memory_for(percent / 100)
        paper, ours = planning.plan("varuna", memory_bytes), planning.plan("adaptive", memory_bytes)
        speedups[str(percent)] = round(paper.step_s / ours.step_s, 3)
        gains[str(percent)] = round(most.step_s / ours.step_s, 3)
        print(
            f"{percent:3} %, {memory_bytes / 1e6:6.0f} MB a worker: {speedups[str(percent)]:.3f}x; "
            f"with plenty for varuna {gains[str(percent)]:.3f}x  kept {ours.kept}",
            flush=True,
        )
    return {"simulated_speedup": speedups, "simulated_gain": gains}


def measured(planning: Planning, rounds: int, steps: int) -> dict[str, Any]:
    """Speed of ``adaptive`` over ``varuna``, where nothing and where 80 % may stay."""
    plans = {}
    for percent in (0, 80):
        memory_bytes = planning.memory_for(percent / 100)
        for policy in ("varuna", "adaptive"):
            plans[policy, percent] = planning.plan(policy, memory_bytes)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in plans}
    for _ in range(rounds):
        for key, plan in plans.items():
            times[key].append(planning.run(plan, steps))
            print(f"{key[0]:9} {key[1]:3} %  {times[key][-1] * 1000:7.0f} ms, kept {plan.first.kept}", flush=True)
    medians = {key: statistics.median(found) for key, found in times.items()}
    return {
        "measured_speedup": {
            str(percent): round(medians["varuna", percent] / medians["adaptive", percent], 3) for percent in (0, 80)
        },
        "measured_share": round(planning.share(plans["adaptive", 80]), 3),
    }


def main() -> None:
    """Print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", action="store_true", help="measure on this machine instead of simulating")
    parser.add_argument("--layers", type=int, help="default: 48, or 12 with --real")
    parser.add_argument("--stages", type=int, help="default: 12, or 4 with --real")
    parser.add_argument("--micro-batches", type=int, help="default: 48, or 16 with --real")
    parser.add_argument("--rounds", type=int, default=3, help="with --real: starts of each plan, interleaved")
    parser.add_argument("--steps", type=int, default=5, help="with --real: measured steps of each start")
    options = parser.parse_args()
    if options.real:
        import torch

        torch.set_num_threads(1)
    layers, stages, micro_batches = (12, 4, 16) if options.real else (48, 12, 48)
    planning = Planning(
        options.layers or layers, options.stages or stages, options.micro_batches or micro_batches
    )  # fmt: skip
    found = measured(planning, options.rounds, options.steps) if options.real else simulated(planning)
    print(json.dumps({"stages": planning.stages, "micro_batches": planning.micro_batches, **found}))


if __name__ == "__main__":
    main()
