"""``varuna simulate``: one step of one pipeline, in units of a forward or with a calibration's own seconds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from varuna.calibration.file import read_calibration
from varuna.calibration.format import Jitter
from varuna.cli.shared import options
from varuna.core.devices import equal_workers
from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.core.units import format_bytes, format_duration
from varuna.extras.pictures.gantt import draw, simulated
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import best_plan
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.process.plain_console import PlainConsole
from varuna.schedule import policy as policies
from varuna.simulator import step as simulator
from varuna.simulator.costs import LinkCosts, uniform
from varuna.simulator.trace import StepTrace

EXAMPLES = """Examples:

\b
varuna simulate --unit --stages 4 --micro-batches 5 --policy varuna
varuna simulate --unit --stages 8 --micro-batches 32 --network 0.05,0.4,0.2 --svg step.svg
varuna simulate --calibration calibration.json --gpus 64 --global-batch 8192 --json
"""
_MOST_FORWARDS = 1_000_000  # over all stages: some five seconds
_CAPTION = "transfer: idle while a message was on its way; stash: most in flight; live: most sets of activations"
_LONGEST = 1e6  # forwards that a message may take: far beyond any network, and all sums stay exact enough


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step, and the plan that it is of; None in units."""

    policy: str
    trace: StepTrace
    micro_batches: int
    split_last: int
    plan: Plan | None = None

    @property
    def title(self) -> str:
        """The policy and its shape."""
        return f"{self.policy}, {len(self.trace.rows)} stages, {self.micro_batches} micro-batches"


def simulate(
    unit: Annotated[
        bool, typer.Option("--unit", help="Equal stages, in units of one forward: F = R = I = W = 1, B = 2.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Simulate the best plan for this calibration, in seconds.")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Number of pipeline stages P.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Number of micro-batches; with --unit.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs to plan for; with --calibration.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Examples per step; with --calibration.")] = None,
    micro_batch: options.MicroBatch = None,
    gpus_per_node: options.GpusPerNode = None,
    policy: Annotated[str, typer.Option(help="One of gpipe, 1f1b, varuna, varuna-strict and adaptive.")] = "adaptive",
    network: Annotated[
        str | None,
        typer.Option(metavar="LATENCY,SERIALISATION,JITTER", help="Of each link, in units of a forward; with --unit."),
    ] = None,
    split_last: Annotated[
        int | None, typer.Option(min=0, help="How many of the last backwards run in two halves.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the jitter.")] = 0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the step to this file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate one step of a pipeline, with the policies that the engine runs.

    Prints the length of the step and, for each stage, how long it computes and
    waits, and what it holds.
    """
    policies.check_policy(policy)
    if unit == (calibration is not None):
        raise UsageError("say what to simulate: either --unit --stages P --micro-batches N, or --calibration FILE")
    if calibration is None:
        _refuse("--unit", gpus=gpus, global_batch=global_batch, micro_batch=micro_batch, gpus_per_node=gpus_per_node)
        link = LinkCosts() if network is None else _parse_network(network)
        outcome = _in_units(stages, micro_batches, policy, link, split_last, seed)
    else:
        _refuse("--calibration", micro_batches=micro_batches, network=network)
        if gpus is None or global_batch is None:
            raise UsageError("--calibration needs --gpus N and --global-batch M")
        request = PlanRequest(
            calibrations=read_calibration(calibration),
            workers=equal_workers(gpus),
            global_batch=global_batch,
            micro_batch=micro_batch,
            stages=stages,
            gpus_per_vm=gpus_per_node,
            policy=policy,
        )
        outcome = _of_plan(request, split_last, seed)
    if svg is not None:
        note = f"bubble {outcome.trace.bubble_fraction:.0%}"
        row = simulated(outcome.title, note, outcome.trace)
        options.write_picture(svg, draw("One simulated step", [row], unit="s" if outcome.plan else "units"))
    if as_json:
        print(json.dumps(report(outcome, seed)))
    else:
        show(PlainConsole(), outcome)


def _refuse(mode: str, **foreign: object) -> None:
    for name, given in foreign.items():
        if given is not None:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {mode}. Leave it out.")


def _in_units(
    stages: int | None, micro_batches: int | None, policy: str, link: LinkCosts, split_last: int | None, seed: int
) -> SimulatedStep:
    """Simulate equal stages, in units of a forward.

    Raises:
        UsageError: no shape, or a step that is too long.
    """
    if stages is None or micro_batches is None:
        raise UsageError("--unit needs a shape: varuna simulate --unit --stages 4 --micro-batches 5")
    _check_size(stages, micro_batches)
    split = policies.split_last(stages, micro_batches, policy) if split_last is None else split_last
    trace = simulator.simulate(
        uniform(stages, link=link), micro_batches=micro_batches, policy=policy, split_last=split, seed=seed
    )
    return SimulatedStep(policy=policy, trace=trace, micro_batches=micro_batches, split_last=split)


def _of_plan(request: PlanRequest, split_last: int | None, seed: int) -> SimulatedStep:
    """Simulate the best plan.

    Raises:
        NoPlanError: no plan fits the calibration's memory.
        UsageError: a step that is too long.
    """
    plan = best_plan(request)
    if split_last is not None:
        plan = plan.with_each_pipeline(split_last=split_last)
    micro_batches = len(plan.micro_batches_of(0))
    _check_size(plan.stages, micro_batches)
    trace = simulator.simulate(
        pipeline_costs(
            profile(request.calibration, plan.micro_batch, streams_frozen=plan.streams_frozen),
            plan,
            gpus_per_vm=request.vm_size,
        ),
        micro_batches=micro_batches,
        policy=plan.policy,
        stash_limits=plan.first.stash_limits,
        split_last=plan.first.split_last,
        empties=plan.first.empties,
        seed=seed,
    )
    return SimulatedStep(
        policy=plan.policy, trace=trace, micro_batches=micro_batches, split_last=plan.first.split_last, plan=plan
    )


def _check_size(stages: int, micro_batches: int) -> None:
    if stages * micro_batches > _MOST_FORWARDS:
        raise UsageError(
            f"{stages} stages x {micro_batches} micro-batches are {stages * micro_batches:,} forwards, more than "
            f"{_MOST_FORWARDS:,}. Ask for fewer: long steps only repeat themselves."
        )


def _parse_network(text: str) -> LinkCosts:
    """Parse ``LATENCY,SERIALISATION,JITTER`` in units of a forward."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(0 <= number <= _LONGEST for number in numbers):
        raise UsageError(
            f"--network {text!r} is not a network. Write latency, serialisation and mean jitter in units of one "
            "forward, three numbers from 0 to a million, such as 0.05,0.4,0.2"
        )
    latency, serialisation, jitter = numbers
    return LinkCosts(
        latency_s=latency, activation_s=serialisation, gradient_s=serialisation, jitter=Jitter(mean_s=jitter)
    )


def report(outcome: SimulatedStep, seed: int) -> dict[str, Any]:
    """Return everything that is printed, as JSON values."""
    trace, plan = outcome.trace, outcome.plan
    found: dict[str, Any] = {"policy": outcome.policy, "micro_batches": outcome.micro_batches}
    suffix = "_s"
    if plan is None:
        suffix = ""
        found["length"] = trace.step_s
    else:
        found |= {
            "step_s": trace.step_s,
            "examples_per_s": plan.global_batch / trace.step_s if trace.step_s else None,
            "plan": plan.model_dump(mode="json"),
        }
    found |= {"bubble": trace.bubble_fraction, "split_last": outcome.split_last, "seed": seed}
    stages = []
    for use, times, bytes_held in zip(trace.usage, trace.stage_times, trace.stage_bytes, strict=True):
        stage: dict[str, Any] = {"stash": use.stash, "live": use.live}
        if plan is not None:
            stage["bytes"] = bytes_held
        stage |= {name.removesuffix("_s") + suffix: seconds for name, seconds in times._asdict().items()}
        stages.append(stage)
    return found | {"stages": stages}


def show(console: PlainConsole, outcome: SimulatedStep) -> None:
    """Print a step as a table."""
    trace, plan = outcome.trace, outcome.plan
    time = format_duration if plan else lambda seconds: f"{seconds:.4g}"
    length = time(trace.step_s) if plan else f"{trace.step_s:.6g} units"
    console.print(f"{outcome.title}: {length}, bubble {trace.bubble_fraction:.1%}")
    if plan is not None:
        console.print(
            f"plan {plan.shape}, m = {plan.micro_batch}: {plan.global_batch / max(trace.step_s, 1e-12):,.4g} "
            f"examples per second, {time(trace.exposed_reduce_s)} of visible all-reduce"
        )
    table = Table("stage", "compute", "transfer", "idle", "stash", "live", caption=_CAPTION)
    if plan is not None:
        for title in ("reduce", "held"):
            table.add_column(title)
    rows = zip(trace.usage, trace.stage_times, trace.stage_bytes, strict=True)
    for stage, (use, times, bytes_held) in enumerate(rows):
        cells = [str(stage), *map(time, times[:3]), str(use.stash), str(use.live)]
        table.add_row(*cells, *([time(times.reduce_s), format_bytes(bytes_held)] if plan else []))
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EXAMPLES)(simulate)
