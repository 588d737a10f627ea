"""``varuna simulate``: one step of one pipeline, in units of a forward or with a calibration's own seconds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from varuna.calibration.file import read_calibration
from varuna.calibration.format import Jitter
from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.core.units import format_bytes, format_duration
from varuna.observe.gantt import draw, simulated
from varuna.planner.choose import best_plan
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.planner.request import PlanRequest
from varuna.schedule.policy import POLICIES, split_last
from varuna.simulator.costs import LinkCosts, uniform
from varuna.simulator.step import simulate
from varuna.simulator.trace import StepTrace

_MOST_FORWARDS = 1_000_000  # over all stages: some five seconds
_CAPTION = "transfer: idle while a message was on its way; stash: most in flight; live: most sets of activations"
_LONGEST = 1e6  # forwards that a message may take: far beyond any network, and all sums stay exact enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line; None: not given."""

    unit: bool
    calibration: Path | None
    stages: int | None
    micro_batches: int | None
    gpus: int | None
    global_batch: int | None
    micro_batch: int | None
    gpus_per_vm: int | None
    policy: str
    network: str | None
    split_last: int | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A simulated step, and the plan that it is of; None in units."""

    options: Options
    trace: StepTrace
    micro_batches: int
    split_last: int
    plan: Plan | None = None

    @property
    def title(self) -> str:
        """The policy and its shape."""
        return f"{self.options.policy}, {len(self.trace.rows)} stages, {self.micro_batches} micro-batches"


def simulate_step(options: Options) -> SimulatedStep:
    """Run the step that was asked for.

    Raises:
        UsageError: options that contradict each other, or lack something.
        NoPlanError: no plan fits the calibration's memory.
    """
    if options.policy not in POLICIES:
        raise UsageError(f"there is no schedule policy {options.policy!r}. Choose one of {', '.join(POLICIES)}.")
    if options.unit == (options.calibration is not None):
        raise UsageError("say what to simulate: either --unit --stages P --micro-batches N, or --calibration FILE")
    return _in_units(options) if options.unit else _calibrated(options)


def _in_units(options: Options) -> SimulatedStep:
    _refuse(options, "--unit", "gpus", "global_batch", "micro_batch", "gpus_per_vm")
    if options.stages is None or options.micro_batches is None:
        raise UsageError("--unit needs a shape: varuna simulate --unit --stages 4 --micro-batches 5")
    _check_size(options.stages, options.micro_batches)
    split = options.split_last
    if split is None:
        split = split_last(options.stages, options.micro_batches, options.policy)
    trace = simulate(
        uniform(options.stages, link=LinkCosts() if options.network is None else _parse_network(options.network)),
        micro_batches=options.micro_batches,
        policy=options.policy,
        split_last=split,
        seed=options.seed,
    )
    return SimulatedStep(options=options, trace=trace, micro_batches=options.micro_batches, split_last=split)


def _calibrated(options: Options) -> SimulatedStep:
    assert options.calibration is not None
    _refuse(options, "--calibration", "micro_batches", "network")
    if options.gpus is None or options.global_batch is None:
        raise UsageError("--calibration needs --gpus N and --global-batch M")
    if options.gpus < 1 or options.global_batch < 1:
        raise UsageError(
            f"--gpus {options.gpus} --global-batch {options.global_batch} leaves nothing to do: both must be at least 1"
        )
    calibration = read_calibration(options.calibration)
    request = PlanRequest(
        calibration=calibration,
        workers=options.gpus,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        stages=options.stages,
        gpus_per_vm=options.gpus_per_vm,
        policy=options.policy,
    )
    plan = best_plan(request)
    if options.split_last is not None:
        plan = plan.model_copy(update={"split_last": options.split_last})
    micro_batches = len(plan.micro_batches_of(0))
    _check_size(plan.stages, micro_batches)
    trace = simulate(
        pipeline_costs(profile(calibration, plan.micro_batch), plan, gpus_per_vm=request.vm_size),
        micro_batches=micro_batches,
        policy=plan.policy,
        stash_limits=plan.stash_limits,
        split_last=plan.split_last,
        seed=options.seed,
    )
    return SimulatedStep(
        options=options, trace=trace, micro_batches=micro_batches, split_last=plan.split_last, plan=plan
    )


def _refuse(options: Options, mode: str, *foreign: str) -> None:
    given = [name for name in foreign if getattr(options, name) is not None]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} has no effect with {mode}. Leave it out.")


def _check_size(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise UsageError(f"{stages} stages and {micro_batches} micro-batches: a step needs at least one of each")
    if stages * micro_batches > _MOST_FORWARDS:
        raise UsageError(
            f"{stages} stages x {micro_batches} micro-batches are {stages * micro_batches:,} forwards, more than "
            f"{_MOST_FORWARDS:,}. Ask for fewer: long steps only repeat themselves."
        )


def _parse_network(text: str) -> LinkCosts:
    """``LATENCY,SERIALISATION,JITTER`` in units of a forward."""
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


def report(outcome: SimulatedStep) -> dict[str, Any]:
    """Everything that is printed, as JSON values."""
    trace, plan = outcome.trace, outcome.plan
    found: dict[str, Any] = {"policy": outcome.options.policy, "micro_batches": outcome.micro_batches}
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
    found |= {"bubble": trace.bubble_fraction, "split_last": outcome.split_last, "seed": outcome.options.seed}
    stages = []
    for use, times, bytes_held in zip(trace.usage, trace.stage_times, trace.stage_bytes, strict=True):
        stage: dict[str, Any] = {"stash": use.stash, "live": use.live}
        if plan is not None:
            stage["bytes"] = bytes_held
        stage |= {name.removesuffix("_s") + suffix: seconds for name, seconds in times._asdict().items()}
        stages.append(stage)
    return found | {"stages": stages}


def show(console: Console, outcome: SimulatedStep) -> None:
    """Print a step as a table."""
    trace, plan = outcome.trace, outcome.plan
    time = format_duration if plan else lambda seconds: f"{seconds:.4g}"
    length = time(trace.step_s) if plan else f"{trace.step_s:.6g} units"
    console.print(f"{outcome.title}: {length}, bubble {trace.bubble_fraction:.1%}", highlight=False)
    if plan is not None:
        console.print(
            f"plan {plan.shape}, m = {plan.micro_batch}: {plan.global_batch / max(trace.step_s, 1e-12):,.4g} "
            f"examples per second, {time(trace.exposed_reduce_s)} of visible all-reduce",
            highlight=False,
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


def simulate_command(options: Options, *, as_json: bool, svg: Path | None) -> None:
    """Simulate, print, draw.

    Raises:
        VarunaError: see ``simulate_step``; or the picture cannot be written.
    """
    outcome = simulate_step(options)
    if svg is not None:
        note = f"bubble {outcome.trace.bubble_fraction:.0%}"
        picture = draw(
            "One simulated step", [simulated(outcome.title, note, outcome.trace)], unit="s" if outcome.plan else "units"
        )
        try:
            svg.write_text(picture)
        except OSError as error:
            raise UsageError(f"cannot write the picture to {svg}: {error.strerror}. Give another file.") from None
    if as_json:
        print(json.dumps(report(outcome)))
    else:
        show(Console(), outcome)
