"""Units of a step under each policy and network, by simulation; and the pictures of docs/schedules.md.

    python benchmarks/schedules.py [--stages 8] [--micro-batches 32 64] [--json]
    python benchmarks/schedules.py --draw docs/schedules.svg
    python benchmarks/schedules.py --measure docs/schedules-measured.svg     # runs the engine on 4 ranks: a minute

One unit is one forward of a stage; R = 1, B = 2, I = 1.22, W = 0.80 (as measured: 0.61 B and 0.40 B). Networks are
those of ``benchmarks/emulated/network.py``, and one worse; with jitter, means over seeds. The picture is the paper's
figure, with I = W = 1. The measured one runs the engine itself with slept compute and real messages, beside
its simulation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.emulated.network import NETWORKS, Network
from varuna.calibration.format import Jitter
from varuna.core.plan import Pipeline, Plan
from varuna.core.times import Interval
from varuna.engine.pipeline.timeline import StepTimes
from varuna.extras.pictures.gantt import Panel, draw
from varuna.extras.pictures.gantt import simulated as panel_of
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import simulated
from varuna.schedule.policy import POLICIES, split_last, stash_limit
from varuna.simulator.bounds import lower_bounds_s
from varuna.simulator.costs import INPUT_SHARE, WEIGHT_SHARE, LinkCosts, PipelineCosts, uniform
from varuna.simulator.step import simulate
from varuna.simulator.trace import StepTrace

ROOT = Path(__file__).resolve().parents[1]
TESTED = {**NETWORKS, "worst": Network(0.1, 0.8, 1.0)}
FIGURE = (("GPipe", "gpipe"), ("Varuna, as in the paper", "varuna-strict"), ("Adaptive", "adaptive"))
KEEPING = {"adaptive, keeps 80 %": 0.2, "adaptive, keeps all": 0.0}
"""Units of R where some of each stage's activations are kept."""
UNIT_S = 0.05


def costs_of(stages: int, network: Network, *, input_share: float, weight_share: float) -> PipelineCosts:
    """Equal stages on equal links."""
    link = LinkCosts(
        latency_s=network.latency,
        activation_s=network.serialisation,
        gradient_s=network.serialisation,
        jitter=Jitter(mean_s=network.jitter),
    )
    even = uniform(stages, link=link)
    stage = replace(even.stages[0], input_s=2 * input_share, weight_s=2 * weight_share)
    return replace(even, stages=(stage,) * stages)


def planned(costs: PipelineCosts, policy: str, micro_batches: int, micro_batch: int = 1) -> Plan:
    """Stages of one section with the policy's own limits; with "adaptive", in the order that simulates best."""
    stages = len(costs.stages)
    pipeline = Pipeline(
        bounds=tuple(range(stages + 1)),
        kept=tuple(int(stage.keeps_all) for stage in costs.stages),
        stash_limits=tuple(stash_limit(stages, k, micro_batches, policy) for k in range(stages)),
        split_last=split_last(stages, micro_batches, policy),
    )
    size = micro_batch * micro_batches
    plan = Plan(micro_batch=micro_batch, global_batch=size, pipelines=(pipeline,), policy=policy)
    return with_best_order(simulated(costs, plan)).plan


def step(costs: PipelineCosts, policy: str, micro_batches: int, seed: int | None = None) -> StepTrace:
    """One step as it is planned."""
    first = planned(costs, policy, micro_batches).first
    return simulate(
        costs,
        micro_batches=micro_batches,
        policy=policy,
        stash_limits=first.stash_limits,
        split_last=first.split_last,
        empties=first.empties,
        seed=seed,
    )


def table(stages: int, micro_batches: int, seeds: int) -> dict[str, dict[str, float]]:
    """Units by policy and network; with kept activations; and the bound of whole backwards without stash limits."""
    units: dict[str, dict[str, float]] = {row: {} for row in (*POLICIES, *KEEPING, "bound")}
    for name, network in TESTED.items():
        costs = costs_of(stages, network, input_share=INPUT_SHARE, weight_share=WEIGHT_SHARE)
        draws = range(seeds) if network.jitter else range(1)
        for policy in POLICIES:
            found = fmean(step(costs, policy, micro_batches, seed).step_s for seed in draws)
            units[policy][name] = round(found, 1)
        for row, recompute in KEEPING.items():
            stage = replace(costs.stages[0], recompute_s=recompute, keeps_all=recompute == 0)
            kept = replace(costs, stages=(stage,) * stages)
            found = fmean(step(kept, "adaptive", micro_batches, seed).step_s for seed in draws)
            units[row][name] = round(found, 1)
        limits = [micro_batches] * stages
        [bound] = lower_bounds_s(costs, micro_batches=micro_batches, stash_limits=[limits], policy="varuna")
        units["bound"][name] = round(bound, 1)
    return units


def figure() -> str:
    """The paper's schedule figure: 4 stages, 5 micro-batches."""
    panels = []
    for title, policy in FIGURE:
        trace = simulate(uniform(4), micro_batches=5, policy=policy, split_last=split_last(4, 5, policy))
        panels.append(panel_of(title, f"bubble {trace.bubble_fraction:.0%}", trace))
    return draw("One step of 4 stages and 5 micro-batches, in units of one forward", panels, unit="units")


def measured(title: str, note: str, stages: Sequence[StepTimes]) -> Panel:
    """The panel of a step that ran, from the times of one replica's stages, whose clocks must agree.

    Times count from the first action.
    """
    zero_s = min((took.begin_s for times in stages for took in times.actions), default=0.0)
    rows = []
    for times in stages:
        shown = (*times.actions, *(phase for phase in times.phases if phase.kind == "reduce"))
        bars = [each.since(zero_s) for each in shown]
        rows.append(tuple(bars))
    return Panel(title, note, tuple(rows))


def measured_figure(network: str, stages: int, micro_batches: int) -> str:
    """Steps of the engine above their simulation."""
    costs = costs_of(stages, NETWORKS[network], input_share=0.6, weight_share=0.4)
    panels: list[Panel] = []
    for title, policy in (("Varuna", "varuna"), ("Adaptive", "adaptive")):
        times = run(policy, network, stages, micro_batches)
        ran = _in_units(measured(f"{title}, measured", f"engine, network '{network}'", times))
        trace = step(costs, policy, micro_batches, seed=0)
        error = trace.step_s / ran.end_s - 1
        panels += [ran, panel_of(f"{title}, simulated", f"{error:+.1%} against the run above", trace)]
    title = f"One step of {stages} stages and {micro_batches} micro-batches: the engine with slept compute"
    return draw(title, panels, unit="units")


def run(policy: str, network: str, stages: int, micro_batches: int) -> list[StepTimes]:
    """Times of each stage in the last step of a short run of the engine."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [policy, str(stages), str(micro_batches), network, str(UNIT_S), "4", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.emulated.ours", *arguments]
        subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=300, check=True)
        return [_times(json.loads((Path(folder) / f"{stage}.json").read_text())) for stage in range(stages)]


def _times(values: list[Any]) -> StepTimes:
    """Inverse of ``json.dumps``."""
    step, begin_s, end_s, *rows = values
    return StepTimes(step, begin_s, end_s, *(tuple(Interval(*each) for each in row) for row in rows))


def _in_units(panel: Panel) -> Panel:
    rows = (tuple(bar.since(0.0, UNIT_S) for bar in row if bar.kind in "FRBIW") for row in panel.rows)
    return replace(panel, rows=tuple(rows))


def main() -> None:
    """Print tables, or draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write the paper's figure instead")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="run the engine, write its picture instead")
    parser.add_argument("--network", choices=NETWORKS, default="mid", help="of the measured picture")
    options = parser.parse_args()
    if options.draw:
        options.draw.write_text(figure())
    elif options.measure:
        options.measure.write_text(measured_figure(options.network, 4, 8))
    else:
        results = []
        for micro_batches in options.micro_batches:
            units = table(options.stages, micro_batches, options.seeds)
            results.append({"stages": options.stages, "micro_batches": micro_batches, "units": units})
            if not options.json:
                print(f"P = {options.stages}, N = {micro_batches}".ljust(22) + "".join(f"{name:>8}" for name in TESTED))
                for policy, found in units.items():
                    print(policy.ljust(22) + "".join(f"{value:8.1f}" for value in found.values()))
        print(json.dumps(results))


if __name__ == "__main__":
    main()
