"""Predicted against measured step times: calibrate once per setting, simulate, then run each plan for real.

    python benchmarks/simulator_accuracy.py [--rounds 3] [--steps 20] [--only TEXT] [--json]

Real compute (GPT-2, 6 layers of width 256) with at most as many ranks as this machine has cores; compute that sleeps
with up to 8 ranks, on emulated networks. Calibrations come from `varuna calibrate`'s own code, with as many workers at
once as the plan has ranks. Plans of a setting run in interleaved rounds, each after a calibration of its own and in
fresh processes; an error is the median over the rounds of prediction over median step. The last line is JSON.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from varuna.calibration.fit import assemble  # noqa: E402
from varuna.calibration.format import Calibration  # noqa: E402
from varuna.calibration.measure.collect import collect  # noqa: E402
from varuna.calibration.measure.rendezvous import StoreHost  # noqa: E402
from varuna.calibration.statistics import spread  # noqa: E402
from varuna.core.plan import Plan  # noqa: E402
from varuna.planner.balance import balance  # noqa: E402
from varuna.planner.pricing.costs import pipeline_costs  # noqa: E402
from varuna.planner.pricing.profile import profile  # noqa: E402
from varuna.schedule.policy import stash_limit  # noqa: E402
from varuna.simulator.step import simulate  # noqa: E402

JOB = ROOT / "benchmarks" / "accuracy_job.py"
WARM_STEPS = 2
SEEDS = 20


@dataclass(frozen=True)
class Setting:
    """What a calibration is of."""

    model: str
    network: str
    workers: int
    """at once"""

    def arguments(self, global_batch: int, micro_batch: int) -> list[str]:
        found = ["--model", self.model, "--network", self.network]
        return [*found, "--global-batch", str(global_batch), "--micro-batch", str(micro_batch)]


@dataclass(frozen=True)
class Case:
    """One configuration."""

    setting: Setting
    stages: int
    replicas: int
    policy: str
    micro_batch: int
    global_batch: int

    @property
    def name(self) -> str:
        shape = f"{self.stages}x{self.replicas}"
        return f"{self.setting.model} {shape} m={self.micro_batch} {self.policy} {self.setting.network}"


def _cases() -> list[Case]:
    one, two = Setting("gpt2", "none", 1), Setting("gpt2", "none", 2)
    mid = Setting("gpt2", "mid", 2)
    real = [
        Case(one, 1, 1, "varuna", 1, 16),
        Case(one, 1, 1, "varuna", 2, 16),
        Case(two, 2, 1, "varuna", 2, 32),
        Case(two, 2, 1, "adaptive", 2, 32),
        Case(two, 2, 1, "gpipe", 2, 32),
        Case(two, 1, 2, "varuna", 2, 32),
        Case(mid, 2, 1, "varuna", 2, 32),
        Case(mid, 2, 1, "gpipe", 2, 32),
    ]
    slept = []
    for network in ("none", "mid", "bad"):
        setting = Setting("slept", network, 8)
        slept += [
            Case(setting, 8, 1, "varuna", 2, 48),
            Case(setting, 4, 2, "adaptive", 2, 48),
            Case(setting, 8, 1, "gpipe", 2, 48),
        ]
    slept += [Case(Setting("slept", "mid", 8), 2, 4, "varuna", 2, 48)]
    return [*real, *slept]


def calibrated(setting: Setting, cases: list[Case]) -> Calibration:
    """What `varuna calibrate` finds for a setting, at the sizes of its cases."""
    store = StoreHost()
    measured = []
    for micro_batch in sorted({case.micro_batch for case in cases}):
        arguments = setting.arguments(max(case.global_batch for case in cases), micro_batch)
        measured += collect(JOB, arguments, workers=setting.workers, store=store.address())
    return assemble(measured, name=setting.model)


def plan_of(case: Case, calibration: Calibration) -> Plan:
    """Balanced by the calibration, with the policy's default depths."""
    times = profile(calibration, case.micro_batch)
    last = [r + b for r, b in zip(times.recompute_s.values, times.backward_s.values, strict=True)]
    inner = [f + rest for f, rest in zip(times.forward_s.values, last, strict=True)]
    micro_batches = -(-case.global_batch // case.micro_batch // case.replicas)
    return Plan(
        stages=case.stages,
        replicas=case.replicas,
        micro_batch=case.micro_batch,
        global_batch=case.global_batch,
        starts=balance(inner, last, case.stages),
        sections=times.sections,
        policy=case.policy,
        stash_limits=tuple(stash_limit(case.stages, k, micro_batches, case.policy) for k in range(case.stages)),
        split_last=case.stages if case.policy == "adaptive" else 0,
    )


def predicted_s(plan: Plan, calibration: Calibration) -> float:
    """Median over the weather of the links."""
    costs = pipeline_costs(profile(calibration, plan.micro_batch), plan, gpus_per_vm=1)
    steps = [
        simulate(
            costs,
            micro_batches=len(plan.micro_batches_of(0)),
            policy=plan.policy,
            stash_limits=plan.stash_limits,
            split_last=plan.split_last,
            seed=seed,
        ).step_s
        for seed in range(SEEDS)
    ]
    return median(steps)


def run(case: Case, plan: Plan, steps: int) -> list[dict[str, Any]]:
    """Run a plan for real; what each rank told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = case.setting.arguments(case.global_batch, case.micro_batch)
    command = [sys.executable, str(JOB), *arguments, "--plan", plan.model_dump_json(), "--steps", str(steps)]
    ranks = []
    for rank in range(plan.workers):
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(plan.workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    told = []
    try:
        for process in ranks:
            output, errors = process.communicate(timeout=300)
            lines = [line for line in output.splitlines() if line.startswith("told ")]
            if not lines:
                raise SystemExit(f"{case.name} failed:\n{errors[-3000:]}")
            told.append(json.loads(lines[-1].removeprefix("told ")))
    finally:
        for process in ranks:
            process.kill()
    return sorted(told, key=lambda each: each["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="run settings and cases whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="also compare what actions took")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = [case for case in _cases() if options.only in case.name]
    for setting in dict.fromkeys(case.setting for case in cases):
        rows += _measure(setting, [case for case in cases if case.setting == setting], options)
    errors = [abs(row["error"]) for row in rows]
    result = {"mean_error": round(mean(errors), 4), "worst_error": round(max(errors), 4), **_order(rows), "rows": rows}
    if not options.json:
        print(f"mean error {mean(errors):.1%}, worst {max(errors):.1%} over {len(rows)} configurations")
    print(json.dumps(result))


def _measure(setting: Setting, cases: list[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Calibrate in between the rounds, so that a noisy machine disturbs both alike."""
    first = calibrated(setting, cases)
    plans = {case: plan_of(case, first) for case in cases}
    predictions: dict[Case, list[float]] = {case: [predicted_s(plans[case], first)] for case in cases}
    times: dict[Case, list[float]] = {case: [] for case in cases}
    ratios: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(options.rounds):
        calibration = calibrated(setting, cases) if number else first
        for case in cases:
            predictions[case] += [predicted_s(plans[case], calibration)] if number else []
            told = run(case, plans[case], options.steps + WARM_STEPS)
            steps_s = told[0]["times"][WARM_STEPS:]
            times[case] += steps_s
            ratios[case].append(predictions[case][-1] / median(steps_s))
            if options.verbose:
                _compare(case, plans[case], calibration, told)
    rows = []
    for case in cases:
        step_s, guess_s = median(times[case]), median(predictions[case])
        row = {
            "case": case.name,
            "ranks": case.stages * case.replicas,
            "global_batch": case.global_batch,
            "predicted_s": round(guess_s, 5),
            "measured_s": round(step_s, 5),
            "error": round(median(ratios[case]) - 1, 4),
            "spread": round(spread(times[case]), 4),
        }
        rows.append(row)
        if not options.json:
            print(
                f"{case.name:40} predicted {guess_s * 1000:7.1f} ms  measured {step_s * 1000:7.1f} ms  "
                f"error {row['error']:+.1%}  spread {row['spread']:.1%}",
                flush=True,
            )
    return rows


def _compare(case: Case, plan: Plan, calibration: Calibration, told: list[dict[str, Any]]) -> None:
    """Actions as predicted and as they were, by stage of the first replica, in ms."""
    costs = pipeline_costs(profile(calibration, plan.micro_batch), plan, gpus_per_vm=1)
    for stage, each in zip(costs.stages, told, strict=False):
        guess = {"F": stage.forward_s, "R": stage.recompute_s, "B": stage.backward_s, "keep": stage.record_s}
        guess |= {"I": stage.input_s, "W": stage.weight_s}
        shown = " ".join(f"{k} {1000 * guess[k]:.2f}/{1000 * v:.2f}" for k, v in each["actions"].items())
        print(f"    rank {each['rank']}: predicted/measured {shown}; keeping F {1000 * stage.record_s:.2f}", flush=True)
    rest = "/".join(f"{1000 * value:.2f}" for value in (costs.optimizer_s, min(each["rest"] for each in told)))
    around = f"action {1000 * calibration.action_s:.2f}, hand-over {1000 * calibration.hand_over_s:.2f}"
    around += f", samples {1000 * calibration.samples_s:.2f}"
    print(f"    optimizer and vote {rest}, {around}", flush=True)


def _order(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pairs of comparable plans (same model, network, ranks and batch) that differ by over 3 %: how many in order."""
    right = wrong = 0
    for a, b in combinations(rows, 2):
        keys = [(row["case"].split()[0], row["case"].split()[-1], row["ranks"], row["global_batch"]) for row in (a, b)]
        if keys[0] != keys[1] or abs(a["measured_s"] / b["measured_s"] - 1) <= 0.03:
            continue
        same = (a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"])
        right, wrong = right + same, wrong + (not same)
    return {"pairs_in_order": right, "pairs_out_of_order": wrong}


if __name__ == "__main__":
    main()
