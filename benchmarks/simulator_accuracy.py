"""Predicted against measured step times: calibrate once per setting, simulate, then run each plan for real.

    python benchmarks/simulator_accuracy.py [--hosts] [--rounds 3] [--steps 20] [--only TEXT] [--json]

Real compute (GPT-2, 6 layers of width 256) with at most as many ranks as this machine has cores; compute that sleeps
with up to 8 ranks, on emulated networks. Calibrations come from `varuna calibrate`'s own code, with as many workers at
once as the plan has ranks. Plans of a setting run in interleaved rounds, each after a calibration of its own and in
fresh processes; an error is the median over the rounds of prediction over median step. The last line is JSON.

Mixes have ranks of which everything takes twice as long, a device class of their own. Pipelines are cut by class, or
run on both ("spanning").

With --hosts, every rank lives on a host of its own (or two share one): network namespaces, whose lines `tc` makes
narrow, so that messages and sums are those of a real TCP over a real queue (with --keeps-pace: which does not begin
slowly after pauses, net.ipv4.tcp_slow_start_after_idle=0). There each plan is also predicted from what runs tell of
themselves, starting from 10 Gb/s Ethernet: the second half of its steps from its own first half ("own"), and from the
first half of each other plan of the setting with as many ranks or more ("others": the error's median). Needs root, ip,
tc, unshare and nsenter.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.accuracy_cases import Case, Setting, on_hosts, on_one_host  # noqa: E402
from benchmarks.accuracy_job import SLOWER, half  # noqa: E402
from benchmarks.emulated.hosts import Hosts  # noqa: E402
from tests.scenarios.network import why_not  # noqa: E402
from varuna.calibration.fit import assemble  # noqa: E402
from varuna.calibration.format import Calibrations  # noqa: E402
from varuna.calibration.nominal import ETHERNET  # noqa: E402
from varuna.calibration.statistics import spread  # noqa: E402
from varuna.core.devices import WorkerGroup, equal_workers  # noqa: E402
from varuna.core.plan import Pipeline, Plan  # noqa: E402
from varuna.core.times import RankTimes, of_stage  # noqa: E402
from varuna.fleet.feedback.refine import refine  # noqa: E402
from varuna.measure.collect import collect  # noqa: E402
from varuna.measure.rendezvous import StoreHost  # noqa: E402
from varuna.planner.asking.request import PlanRequest  # noqa: E402
from varuna.planner.balance import balance  # noqa: E402
from varuna.planner.pricing.profile import profile  # noqa: E402
from varuna.planner.pricing.spanning import spanning_costs  # noqa: E402
from varuna.planner.spanning import spanning  # noqa: E402
from varuna.planner.sweep import rank_plans  # noqa: E402
from varuna.planner.unlike import of_depths  # noqa: E402
from varuna.schedule.policy import stash_limit  # noqa: E402
from varuna.simulator.step import simulate  # noqa: E402

JOB = ROOT / "benchmarks" / "accuracy_job.py"
WARM_STEPS = 2
SEEDS = 20


def calibrated(setting: Setting, cases: list[Case], hosts: Hosts | None = None) -> Calibrations:
    """Calibrate a setting as `varuna calibrate` does, at the sizes of its cases."""
    measured = []
    for micro_batch in sorted({case.micro_batch for case in cases}):
        arguments = setting.arguments(max(case.global_batch for case in cases), micro_batch)
        if hosts is not None:
            measured += hosts.collect(JOB, arguments, setting.workers)
        else:
            store = StoreHost()
            measured += collect(JOB, arguments, workers=setting.workers, store=store.address())
    found = assemble(measured, name=setting.model)
    return Calibrations.of_one(found.rounded() if setting.reduction == "bf16" else found)


def plan_of(case: Case, calibrations: Calibrations) -> Plan:
    """Balanced by the calibration, with the policy's default depths."""
    if case.fast:
        return _by_class(case, calibrations)
    if case.depths:
        return _mixed(case, calibrations)
    times = profile(calibrations.first, case.micro_batch)
    last = [r + b for r, b in zip(times.recompute_s.values, times.backward_s.values, strict=True)]
    inner = [f + rest for f, rest in zip(times.forward_s.values, last, strict=True)]
    micro_batches = -(-case.global_batch // case.micro_batch // case.replicas)
    return Plan(
        micro_batch=case.micro_batch,
        global_batch=case.global_batch,
        pipelines=(
            Pipeline(
                replicas=case.replicas,
                bounds=(*balance(inner, last, case.stages), times.sections),
                stash_limits=tuple(stash_limit(case.stages, k, micro_batches, case.policy) for k in range(case.stages)),
                split_last=case.stages if case.policy == "adaptive" else 0,
            ),
        ),
        policy=case.policy,
    )


def _mixed(case: Case, calibrations: Calibrations) -> Plan:
    alike = (replace(case, stages=depth, replicas=len(case.depths), depths=()) for depth in dict.fromkeys(case.depths))
    request = PlanRequest(
        calibrations=calibrations, workers=equal_workers(case.ranks), global_batch=case.global_batch, gpus_per_vm=1
    )
    found = of_depths(case.depths, [plan_of(each, calibrations) for each in alike], request)
    assert found is not None
    return found.plan


def _by_class(case: Case, calibrations: Calibrations) -> Plan:
    """The best plan for all ranks, whose pipelines are each on one class, or on both."""
    workers = tuple(WorkerGroup.of_class(name, count) for name, count in (("fast", case.fast), ("slow", case.slow)))
    request = PlanRequest(
        calibrations=calibrations,
        workers=workers,
        global_batch=case.global_batch,
        micro_batch=case.micro_batch,
        stages=case.stages or None,
        gpus_per_vm=1,
        policy=case.policy,
        leaves_idle=False,
    )
    if not case.stages:
        return spanning(request, [case.micro_batch])[0].plan
    return next(plan for plan in rank_plans(request).plans if plan.is_by_class and plan.workers == case.ranks)


def predicted_s(plan: Plan, calibrations: Calibrations) -> float:
    """Of the pipelines that end last: the median over the weather of the links."""
    found, vm_size = [], calibrations.first.hardware.gpus_per_vm
    for replicas, cut in plan.kinds:
        costs = spanning_costs(plan.as_if_all(cut), calibrations.of, gpus_per_vm=vm_size)
        steps = [
            simulate(
                costs,
                micro_batches=len(plan.micro_batches_of(replicas.start)),
                policy=plan.policy,
                stash_limits=cut.stash_limits,
                split_last=cut.split_last,
                empties=cut.empties,
                seed=seed,
            ).step_s
            for seed in range(SEEDS)
        ]
        found.append(median(steps))
    return max(found)


def run(case: Case, plan: Plan, steps: int, hosts: Hosts | None = None) -> list[dict[str, Any]]:
    """Run a plan for real; what each rank told."""
    if hosts is not None:
        port = hosts.free_port()
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    ranks = []
    for rank in range(plan.workers):
        setting = replace(case.setting, slower=SLOWER if plan.class_of(rank) == "slow" else 1.0)
        arguments = setting.arguments(case.global_batch, case.micro_batch)
        command = [sys.executable, str(JOB), *arguments, "--plan", plan.model_dump_json(), "--steps", str(steps)]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(plan.workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        start = command
        if hosts is not None:
            environment, start = hosts.environment(rank, plan.workers, port), hosts.command(rank, command)
        ranks.append(
            subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


def refined(case: Case, plan: Plan, calibrations: Calibrations, told: list[dict[str, Any]]) -> Calibrations:
    """Return what a run of the plan would know after the first half of its steps, if it began knowing no network."""
    begun = calibrations.each(lambda known: known.model_copy(update={"across_vms": ETHERNET}))
    reported = [RankTimes.model_validate(each["reported"]) for each in told]
    return refine(begun, plan, [of_stage(reported[stage :: case.stages]) for stage in range(case.stages)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", action="store_true", help="ranks on hosts with narrow lines, instead of one host")
    parser.add_argument(
        "--keeps-pace", action="store_true", help="hosts on which TCP does not begin slowly after pauses"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="run settings and cases whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="also compare what actions took")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    options = parser.parse_args()
    if options.hosts and (reason := why_not("tc")):
        raise SystemExit(f"skipped: {reason}")
    rows: list[dict[str, Any]] = []
    cases = [case for case in (on_hosts() if options.hosts else on_one_host()) if options.only in case.name]
    for setting in dict.fromkeys(case.setting for case in cases):
        rows += _measure(setting, [case for case in cases if case.setting == setting], options)
    result: dict[str, Any] = {"rows": rows}
    for name, what in _ERRORS.items():
        errors = [abs(row[name]) for row in rows if name in row]
        if errors:
            result |= {f"mean_{name}": round(mean(errors), 4), f"worst_{name}": round(max(errors), 4)}
            if not options.json:
                print(f"{what}: mean error {mean(errors):.1%}, worst {max(errors):.1%} of {len(errors)} configurations")
    print(json.dumps(result | _order(rows)))


_ERRORS = {
    "error": "calibrated",
    "own_error": "from its own first half",
    "others_error": "from what other plans told",
}


def _measure(setting: Setting, cases: list[Case], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Calibrate in between the rounds, so that a noisy machine disturbs both alike."""
    with ExitStack() as stack:
        hosts = apart = None
        if bits_per_s := 1e6 * setting.mbits_per_s:
            hosts, apart = (
                stack.enter_context(
                    closing(Hosts(setting.workers, per_host, bits_per_s, keeps_pace=options.keeps_pace))
                )
                for per_host in (setting.per_host, 1)
            )
        first = _on_hosts(setting, cases, apart)
        plans = {case: plan_of(case, first) for case in cases}
        seen: dict[Case, list[Seen]] = {case: [] for case in cases}
        for number in range(options.rounds):
            calibrations = _on_hosts(setting, cases, apart) if number else first
            for case in cases:
                told = run(case, plans[case], options.steps + WARM_STEPS, hosts)
                seen[case].append(Seen(calibrations, told))
                if options.verbose:
                    _compare(case, plans[case], calibrations, told)
    rows = [_row(case, plans, seen) for case in cases]
    for row in rows if not options.json else ():
        more = [f"{name.removesuffix('_error')} {row[name]:+.1%}" for name in _ERRORS if name in row]
        print(
            f"{row['case']:50} predicted {row['predicted_s'] * 1000:7.1f} ms  measured "
            f"{row['measured_s'] * 1000:7.1f} ms  {'  '.join(more)}  spread {row['spread']:.1%}",
            flush=True,
        )
    return rows


class Seen(NamedTuple):
    """A calibration, and what the ranks of a run told afterwards."""

    calibrations: Calibrations
    told: list[dict[str, Any]]

    @property
    def steps_s(self) -> list[float]:
        """Of all steps but the first."""
        times: list[float] = self.told[0]["times"]
        return times[WARM_STEPS:]

    @property
    def later_s(self) -> float:
        """The typical step of the second half."""
        times: list[float] = self.told[0]["times"]
        return median(times[half(len(times)) :])


def _on_hosts(setting: Setting, cases: list[Case], hosts: Hosts | None) -> Calibrations:
    """Calibrated with each rank on a host of its own; what ranks of one host have between them is the loopback."""
    if setting.is_mixed:
        factors = {"fast": 1.0, "slow": SLOWER}
        return Calibrations(
            classes={name: calibrated(replace(setting, slower=factor), cases).first for name, factor in factors.items()}
        )
    across = calibrated(setting, cases, hosts)
    if setting.per_host == 1:
        return across
    within = calibrated(replace(setting, mbits_per_s=0), cases).first.across_vms
    hardware = across.first.hardware.model_copy(update={"gpus_per_vm": setting.per_host})
    return across.each(lambda known: known.model_copy(update={"within_vm": within, "hardware": hardware}))


def _row(case: Case, plans: dict[Case, Plan], seen: dict[Case, list[Seen]]) -> dict[str, Any]:
    plan, rounds = plans[case], seen[case]
    guesses = [predicted_s(plan, each.calibrations) for each in rounds]
    steps_s = [step_s for each in rounds for step_s in each.steps_s]
    row = {
        "case": case.name,
        "ranks": case.ranks,
        "global_batch": case.global_batch,
        "predicted_s": round(median(guesses), 5),
        "measured_s": round(median(steps_s), 5),
        "error": round(median(g / median(e.steps_s) for g, e in zip(guesses, rounds, strict=True)) - 1, 4),
        "spread": round(spread(steps_s), 4),
    }
    if case.setting.mbits_per_s:
        for name, others in {"own_error": [case], "others_error": [other for other in plans if other != case]}.items():
            found = [
                predicted_s(plan, refined(other, plans[other], theirs.calibrations, theirs.told)) / here.later_s
                for other in others
                for theirs, here in zip(seen[other], rounds, strict=True)
            ]
            row |= {name: round(median(found) - 1, 4)} if found else {}
    return row


def _compare(case: Case, plan: Plan, calibrations: Calibrations, told: list[dict[str, Any]]) -> None:
    """Actions as predicted and as they were, by stage of the first replica, in ms."""
    costs = spanning_costs(plan.as_if_all(plan.first), calibrations.of, gpus_per_vm=1)
    for stage, each in zip(costs.stages, told, strict=False):
        guess = {"F": stage.forward_s, "R": stage.recompute_s, "B": stage.backward_s, "keep": stage.record_s}
        guess |= {"I": stage.input_s, "W": stage.weight_s}
        shown = " ".join(f"{k} {1000 * guess[k]:.2f}/{1000 * v:.2f}" for k, v in each["actions"].items())
        print(f"    rank {each['rank']}: predicted/measured {shown}; keeping F {1000 * stage.record_s:.2f}", flush=True)
    rest = "/".join(f"{1000 * value:.2f}" for value in (costs.optimizer_s, min(each["rest"] for each in told)))
    around = f"action {1000 * calibrations.first.action_s:.2f}, hand-over {1000 * calibrations.first.hand_over_s:.2f}"
    around += f", samples {1000 * calibrations.first.samples_s:.2f}"
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
