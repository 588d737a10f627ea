"""``varuna plan``: which P x D and m to train with, what a step is spent on, and what does not fit."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from varuna.calibration.file import RUN_FILE, check_matches, read_calibration
from varuna.calibration.format import Calibration, Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.cli.shared import options
from varuna.core.devices import WorkerGroup, WorkerGroups, equal_workers, reserved_bytes
from varuna.core.errors import NoPlanError, UsageError
from varuna.core.plan import Copies
from varuna.core.units import format_bytes, format_duration
from varuna.planner.asking.ranking import Rejection
from varuna.planner.asking.request import Objective, PlanRequest
from varuna.planner.choose import Flags, by_goodput, explain, with_options
from varuna.planner.line import line_of
from varuna.planner.report import RankingReport, report
from varuna.planner.sweep import rank_plans
from varuna.process.plain_console import PlainConsole

if TYPE_CHECKING:
    import torch

    from varuna.job.spec import JobSpec

EXAMPLES = """Examples:

\b
varuna plan train.py --gpus 36
varuna plan train.py --gpus 36 --calibration calibration.json -- --lr 1e-3
varuna plan --calibration examples/calibrations/gpt2-8.3b-v100.json --gpus 128 --json
varuna plan --calibration a100.json --gpus 8 --calibration v100.json --gpus 16
"""
DEFAULT_GLOBAL_BATCH = 8192
"""The paper's global batch, unless a job or a flag gives another."""
_SHOWN = 5  # plans that are simulated and printed
_WIDE = 110  # columns from which a step's parts are printed
_REJECTED = 4
_STAGES_SHOWN = 20


def plan(
    script: Annotated[
        Path | None, typer.Argument(help="Training script; it runs until it asks its Trainer for steps.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Measured or written by hand; one for each kind of GPU. Default: nominal figures."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Plan from what the steps of this run took.")
    ] = None,
    gpus: Annotated[
        list[int], typer.Option("--gpus", min=1, help="Number of GPUs; of several kinds, one for each --calibration.")
    ] = ...,  # type: ignore[assignment]
    slower: Annotated[
        str | None,
        typer.Option(
            metavar="NxSHARE",
            help="Of the GPUs, N that compute at a share of the others' speed: 4x0.5, or 4x0.5,8x0.25.",
        ),
    ] = None,
    gpus_per_node: options.GpusPerNode = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per step. Default: the script's, or 8192.")
    ] = None,
    micro_batch: options.MicroBatch = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline stages P. Default: all that fit.")] = None,
    memory_per_worker: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one GPU, such as 16GB. Default: the calibration's.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="Price per GPU and hour. Default: the calibration's.")
    ] = None,
    objective: Annotated[Objective, typer.Option(help="The fastest step, or the most examples per dollar.")] = "time",
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Keep optimizer state in host memory, like the Trainer's.")
    ] = False,
    shard_optimizer: Annotated[
        bool,
        typer.Option("--shard-optimizer", help="Distribute optimizer state over replicas, like the Trainer's option."),
    ] = False,
    stream_frozen: Annotated[
        bool,
        typer.Option(
            "--stream-frozen",
            help="Keep what is not trained in host memory, like the Trainer's option. Default: if nothing else fits.",
        ),
    ] = False,
    losses_per_hour: Annotated[
        float,
        typer.Option(
            min=0, metavar="X", help="Rank by what is left at so many losses of a worker per hour, all GPUs together."
        ),
    ] = 0.0,
    as_json: options.AsJson = False,
) -> None:
    """Rank the plans for N GPUs, and show what each step spends its time on.

    With --calibration this needs neither torch nor a GPU. Nothing is started.
    """
    if calibration and run is not None:
        raise UsageError("--calibration and --run both name what to plan from. Give one of them.")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UsageError(f"--price {price} is not a price. Give dollars per GPU and hour, such as 0.61")
    files = (calibration or []) if run is None else [calibration_of_run(run)]
    first = asked(script, args or [], _together(files) if files else None)
    known = first.calibrations
    if slower and len(gpus) > 1:
        raise UsageError("--slower is for GPUs of one kind. Give each kind its own --calibration and --gpus.")
    if shard_optimizer:
        known = known.each(Calibration.with_sharded_optimizer)
    if offload_optimizer:
        known = known.each(Calibration.offloaded)
    request = first.model_copy(
        update={
            "calibrations": known,
            "workers": slowed(gpus[0], slower) if slower else groups_of(known, gpus),
            "global_batch": global_batch or first.global_batch,
            "micro_batch": micro_batch or first.micro_batch,
            "memory_bytes": options.memory_bytes_of(memory_per_worker),
            "gpus_per_vm": gpus_per_node,
            "stages": stages,
            "streams_frozen": stream_frozen or first.streams_frozen,
            "objective": objective,
            "losses_per_hour": losses_per_hour,
        }
    )
    ranking = rank_plans(request)
    if losses_per_hour:
        worth = by_goodput(ranking, request, copies=True)[:_SHOWN]
        plans, predictions = tuple(each.plan for each in worth), tuple(each.prediction for each in worth)
        ranking = replace(ranking, plans=plans, predictions=predictions)
    line = line_of(ranking.plans[0], request) if ranking.plans else None
    found = report(request, ranking, price_per_hour=price).model_copy(update={"line": line})
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        show(PlainConsole(), found)
    if not ranking.plans:
        raise NoPlanError(explain(ranking, request, Flags(memory="--memory-per-worker")))


def slowed(gpus: int, slower: str) -> WorkerGroups:
    """Describe GPUs of which some are as slow as ``--slower`` says.

    Raises:
        UsageError: it is not of the form, or names more GPUs than there are.
    """
    left, found = gpus, list[WorkerGroup]()
    for part in slower.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d*\.?\d+)\s*", part)
        if match is None or not 0 < float(match[2]) <= 1 or not 0 < int(match[1]) <= left:
            raise UsageError(
                f"--slower {slower} does not say how many of the {gpus} GPUs compute at which share of the others' "
                "speed. Give numbers and shares between 0 and 1, such as 4x0.5 or 4x0.5,8x0.25"
            )
        found.append(WorkerGroup(count=int(match[1]), speed=float(match[2])))
        left -= int(match[1])
    return (*equal_workers(left), *found)


def groups_of(known: Calibrations, gpus: Sequence[int]) -> WorkerGroups:
    """Return the number of GPUs of each class that was calibrated; () where there is one.

    Raises:
        UsageError: there is not one number for each.
    """
    if len(gpus) != len(known.classes):
        names = ", ".join(name or "one kind" for name in known.classes)
        raise UsageError(
            f"--gpus was given {len(gpus)} times, but calibrated {'is' if len(known.classes) == 1 else 'are'} {names}. "
            "Give --calibration and --gpus once for each kind of GPU, in the same order."
        )
    if len(gpus) == 1:
        return equal_workers(gpus[0])
    return tuple(WorkerGroup.of_class(name, count) for name, count in zip(known.classes, gpus, strict=True))


def _together(files: Sequence[Path]) -> Calibrations:
    """Join the calibrations of several files, each of one kind of GPU, named as its file says.

    Raises:
        UsageError: a file cannot be read, two are of GPUs of one name, or of different models.
    """
    read = [read_calibration(file) for file in files]
    if len(read) == 1:
        return read[0]
    names = [name for each in read for name in each.named().names]
    if len(set(names)) < len(names):
        raise UsageError(f"two calibrations are of one class: {'; '.join(names)}. Give it another name in one file.")
    try:
        return reduce(Calibrations.joined, (each.named() for each in read))
    except ValidationError as error:
        raise UsageError(f"the calibrations do not go together: {error.errors()[0]['msg']}") from error


def calibration_of_run(run_dir: Path) -> Path:
    """The calibration file that a run writes to its folder once its ranks have reported some steps.

    Raises:
        UsageError: the run has written none.
    """
    path = run_dir / RUN_FILE
    if not path.is_file():
        raise UsageError(
            f"no {RUN_FILE} in {run_dir}. A run writes it after all of its ranks have reported some seconds of "
            "training; `varuna run --run-dir DIR` keeps its folder."
        )
    return path


def asked(script: Path | None, args: Sequence[str], given: Calibrations | None) -> PlanRequest:
    """The request of the script's job, or of a calibration alone, for one GPU."""
    if script is None:
        if given is None:
            raise UsageError("say what to plan for: varuna plan train.py --gpus N, or --calibration FILE --gpus N")
        return PlanRequest(
            calibrations=given,
            workers=equal_workers(1),
            global_batch=DEFAULT_GLOBAL_BATCH,
            memory_apart=True,
            wanted=_SHOWN,
        )
    from varuna.job.script_runner import output_as_errors, take_job

    with output_as_errors():
        return request_of(take_job(script, args).spec, given)


def request_of(spec: "JobSpec", given: Calibrations | None = None) -> PlanRequest:
    """Make the planner's request for a job on one GPU; without ``given``, nominal figures and this machine's memory."""
    from varuna.job.start import job_facts

    job = job_facts(spec, 0)
    if given is not None:
        check_matches(given, job.model)
    return PlanRequest(
        calibrations=with_options(given or _on_this(spec.device, nominal_calibration(job.model)), job),
        workers=equal_workers(1),
        global_batch=job.global_batch,
        micro_batch=job.micro_batch,
        tentative=job.combines,
        memory_apart=job.memory_apart,
        streams_frozen=job.memory.stream_frozen,
        wanted=_SHOWN,
    )


def _on_this(device: "torch.device", nominal: Calibration) -> Calibrations:
    """The nominal calibration with the memory of the script's GPU, which stands for all GPUs; a CPU's is not used."""
    from varuna.engine.device.streams import streams_of

    streams = streams_of(device)
    found = None if streams is None else streams.memory()
    if found is None:
        return Calibrations.of_one(nominal)
    own = {"memory_bytes": found.memory_bytes, "reserved_bytes": reserved_bytes(found.memory_bytes)}
    hardware = nominal.hardware.model_copy(update=own)
    return Calibrations.of_one(nominal.model_copy(update={"hardware": hardware}))


def show(console: PlainConsole, found: RankingReport) -> None:
    """Print a ranking: a table, how the best plan works, what lost, what does not fit."""
    memory = "" if found.memory_bytes is None else f", {format_bytes(found.memory_bytes)} per GPU"
    dated = f" ({found.calibrated})" if found.calibrated else ""
    title = f"{found.model}   global batch {found.global_batch}   {found.gpus} GPUs   {found.hardware}{dated}{memory}"
    console.print(title)
    if found.plans:
        console.print(_table(found, wide=console.width >= _WIDE))
        _show_best(console, found)
    if found.outpaced:
        nearest = found.outpaced[0]
        more = f", and {len(found.outpaced) - 1} other depths" if len(found.outpaced) > 1 else ""
        console.print(
            f"slower: {nearest.stages} x {nearest.replicas} takes at least {format_duration(nearest.at_least_s)}{more}"
        )
    for rejection in found.rejected[-_REJECTED:]:
        console.print(f"rejected: {_rejected(found, rejection)}")
    if len(found.rejected) > _REJECTED:
        console.print(f"rejected: {len(found.rejected) - _REJECTED} shallower ones that need more")


def _table(found: RankingReport, *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shows_bubble = wide or not found.losses_per_hour
    titles = ["", "P x D", "m", "N_m", "step", "ex/s", *(["bubble"] if shows_bubble else [])]
    titles += ["compute", "transfer", "all-reduce", "idle"] if wide else []
    titles += ["a loss", "ex/s left"] if found.losses_per_hour else []
    titles += ["memory", *(["$/M ex"] if found.plans[0].dollars_per_million_examples is not None else []), "slower"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for plan in found.plans:
        parts = plan.breakdown
        shares = (parts.compute_s, parts.transfer_s, parts.reduce_s, parts.idle_s)
        dollars = plan.dollars_per_million_examples
        table.add_row(
            ">" if plan is found.plans[0] else "",
            _spaced(plan.shape),
            str(plan.micro_batch),
            str(plan.micro_batches),
            format_duration(plan.step_time_s),
            f"{plan.examples_per_s:.4g}",
            *([f"{plan.bubble:.1%}"] if shows_bubble else []),
            *([f"{share / plan.step_time_s:.1%}" for share in shares] if wide else []),
            *(
                [format_duration(plan.loss_s), f"{plan.examples_per_s_left:.4g}"]
                if plan.loss_s is not None and plan.examples_per_s_left is not None
                else []
            ),
            format_bytes(max(plan.memory_bytes)),
            *([] if dollars is None else [f"{dollars:.4g}"]),
            "" if plan is found.plans[0] else f"{plan.slower:+.1%}",
        )
    return table


def _spaced(shape: str) -> str:
    """``"4 x 1 + 3 x 2"``."""
    return shape.replace("x", " x ").replace("+", " + ")


_COPIED = {
    Copies.STATE: ", with a copy of each stage's state every few steps, and of its sums of gradients in long ones",
    Copies.SUMS: ", with copies of each stage's sums of gradients",
}


def _show_best(console: PlainConsole, found: RankingReport) -> None:
    best = found.plans[0]
    idle = f", {best.gpus_idle} idle" if best.gpus_idle else ""
    least, most = (format_bytes(extreme(best.memory_bytes)) for extreme in (min, max))
    lines = [
        f"{best.gpus_used} of {found.gpus} GPUs are used{idle}; {best.sharing}",
        *(f"on {each.name}: {_spaced(each.shape)}, {each.micro_batches} micro-batches in all" for each in best.classes),
        *found.idle,
        f"memory of a stage: {least} to {most}; first stage {best.in_flight[0]} micro-batches in flight",
    ]
    if any(best.kept):
        kept = " ".join(map(str, best.kept[:_STAGES_SHOWN]))
        more = " ..." if len(best.kept) > _STAGES_SHOWN else ""
        lines.append(f"sections whose activations are kept, by stage: {kept}{more}")
    if best.stash_on_device != best.in_flight:
        stay = " ".join(map(str, best.stash_on_device[:_STAGES_SHOWN]))
        more = " ..." if len(best.stash_on_device) > _STAGES_SHOWN else ""
        lines.append(f"of those in flight, inputs that stay on the GPU, by stage: {stay}{more}; others in host memory")
    if best.streams_frozen:
        lines.append("parameters that are not trained rest in host memory; on the GPU are those of two sections")
    if best.host_bytes:
        least, most = (format_bytes(extreme(best.host_bytes)) for extreme in (min, max))
        lines.append(f"host memory of a stage: {least} to {most}")
    if best.split_last:
        lines.append(f"the last {best.split_last} backwards of a replica are split in two")
    if best.empties:
        lines.append("the stage before the last runs empty again and again, and recomputes less")
    if found.losses_per_hour:
        kept = _COPIED.get(best.copies, "")
        lines.append(f"chosen by what is left at {found.losses_per_hour:g} losses per hour{kept}")
    if found.line is not None:
        lines.append(found.line.in_words())
    if best.dollars_per_hour is not None:
        lines.append(f"$ {best.dollars_per_hour:.4g} per hour for the VMs in use")
    for line in lines:
        console.print(f"  {line}")
    for plan in found.plans[1:]:
        console.print(f"{_spaced(plan.shape)}, m = {plan.micro_batch}: {plan.why}")


def _rejected(found: RankingReport, rejection: Rejection) -> str:
    shape = f"{rejection.stages} x {rejection.replicas}" if rejection.replicas else f"P={rejection.stages}"
    fitting = [plan.stages for plan in found.plans if plan.stages > rejection.stages]
    fitting += [plan.stages for plan in found.outpaced if plan.stages > rejection.stages]
    fits = (
        f"; P={min(fitting)} fits"
        if fitting and rejection.missing_bytes is not None and not rejection.device_class
        else ""
    )
    return f"{shape}  {rejection.reason}{fits}"
