"""``varuna inspect``: what Varuna makes of a job's model."""

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from varuna.cli.plan import request_of
from varuna.cli.shared import options
from varuna.core.devices import equal_workers
from varuna.core.errors import DataError, ModelError
from varuna.core.units import format_bytes
from varuna.planner.choose import best_plan
from varuna.process.plain_console import PlainConsole

if TYPE_CHECKING:
    from varuna.checks.dependencies.tracer import Dependency
    from varuna.job.spec import JobSpec
    from varuna.partition.model import PartitionedModel

_NAMES_SHOWN = 6
_EXAMPLES = 4


def inspect(
    context: typer.Context,
    script: options.JobScript,
    args: options.ScriptArguments = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Show the best plan with P stages, on P GPUs.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with plain PyTorch; exit code 1 if it differs.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run a step; report code that needs values of several stages.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show where Varuna cuts the model of SCRIPT, and what crosses each cut."""
    options.check_misplaced(context, script, args or [])
    from varuna.checks.dependencies.tracer import find_dependencies
    from varuna.job.script_runner import output_as_errors, take_job
    from varuna.job.start import engine_job

    with output_as_errors():  # whatever the script and the model's constructor print
        spec = take_job(script, args or []).spec
        model = spec.partitioned
        verification = _verified(spec) if verify else None
        dependencies = None
        if trace:
            initial = spec.initial()
            job = engine_job(spec, model, initial.buffers)
            dependencies = find_dependencies(job, spec.recipe, initial, spec.batch(_EXAMPLES))
        starts: tuple[int, ...] = (0,)
        if stages:
            asked = {"workers": equal_workers(stages), "stages": stages}
            starts = best_plan(request_of(spec).model_copy(update=asked)).first.starts
        report = describe(model, starts, verification, dependencies)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(PlainConsole(), report)
    if verification is not None and verification["finding"] is not None:
        raise typer.Exit(1)


def describe(
    model: "PartitionedModel",
    starts: tuple[int, ...],
    verification: dict[str, Any] | None,
    dependencies: "list[Dependency] | None",
) -> dict[str, Any]:
    """Everything that is printed, as JSON values; None for what was not asked for."""
    return {
        "cut_points": _cut_points(model),
        "stages": _stages(model, starts),
        "tied": [{"name": tied.name, "sections": list(tied.sections)} for tied in model.facts.tied],
        "eager": [{"module": path, "why": why} for path, why in model.eager.items()],
        "batch_dependent": model.facts.batch_dependent,
        "mixes": [asdict(each) for graph in model.graphs for each in (*graph.mixing, *graph.normalisations)],
        "verify": verification,
        "dependencies": None if dependencies is None else [asdict(each) for each in dependencies],
    }


def _cut_points(model: "PartitionedModel") -> list[dict[str, Any]]:
    total = sum(section.forward_s for section in model.facts.sections) or 1.0
    found = []
    for section, facts, into in zip(model.sections, model.facts.sections, model.split.crossings[1:], strict=False):
        found.append(
            {
                "op": section.makes[-1] if section.makes else into[-1].name,
                "module": facts.label,
                "bytes_per_example": facts.boundary_bytes,
                "share": facts.forward_s / total,
                "crosses": [
                    {
                        "name": c.name,
                        "shape": [_extent(*extent) for extent in zip(c.fixed, c.per_example, strict=True)],
                        "dtype": str(c.dtype).removeprefix("torch."),
                        "gradient": c.differentiable,
                        "bytes_per_example": math.prod(c.shape(1)) * c.dtype.itemsize,
                    }
                    for c in into
                ],
            }
        )
    return found


def _extent(fixed: int, per_example: int) -> int | str:
    """A dimension for B examples: ``16``, ``B``, ``3B``, ``3B+1``."""
    if not per_example:
        return fixed
    return f"{'' if per_example == 1 else per_example}B{f'+{fixed}' if fixed else ''}"


def _stages(model: "PartitionedModel", starts: tuple[int, ...]) -> list[dict[str, Any]]:
    facts = model.facts.sections
    costs = [section.forward_s for section in facts]
    ends = (*starts[1:], len(facts))
    total = sum(costs) or 1.0
    return [
        {
            "sections": [start, end - 1],
            "parameters": sum(facts[i].parameter_bytes for i in range(start, end)) // 4,
            "forward_s_per_example": sum(costs[start:end]),
            "share": sum(costs[start:end]) / total,
            "activation_bytes_per_example": sum(facts[i].activation_bytes for i in range(start, end)),
        }
        for start, end in zip(starts, ends, strict=True)
    ]


def _short(dtype: str) -> str:
    """``float32`` -> ``f32``."""
    return dtype.replace("float", "f").replace("uint", "u").replace("int", "i")


def show(console: PlainConsole, report: dict[str, Any]) -> None:
    """Print a report as tables."""
    cuts = Table("cut", title="Cut-points (bytes per example, share of compute)")
    cuts.add_column("after", overflow="fold")
    for title in ("op", "bytes", "what crosses", "share"):
        cuts.add_column(title)
    for number, cut in enumerate(report["cut_points"]):
        size = format_bytes(cut["bytes_per_example"])
        crosses = "\n".join(f"{_short(c['dtype'])}[{', '.join(map(str, c['shape']))}]" for c in cut["crosses"])
        cuts.add_row(str(number), cut["module"], cut["op"], size, crosses, f"{cut['share']:.1%}")
    console.print(cuts)
    stages = Table("stage", "sections", "parameters", "share of compute", "activations / example", title="Stages")
    for number, stage in enumerate(report["stages"]):
        first, last = stage["sections"]
        activations = format_bytes(stage["activation_bytes_per_example"])
        stages.add_row(str(number), f"{first}-{last}", f"{stage['parameters']:,}", f"{stage['share']:.1%}", activations)
    console.print(stages)
    for tied in report["tied"]:
        console.print(f"tied: {tied['name']} in sections {', '.join(map(str, tied['sections']))}")
    for eager in report["eager"]:
        console.print(f"runs as written: {eager['module']}, since {eager['why']}")
    for each in report["mixes"]:
        doubt = "" if each["certain"] else " (looked at before the first step)"
        where = f" at {each['where']}" if each["where"] else ""
        told = f"mixes examples: {each['operation']}{where}: {each['what']}{doubt}"
        console.print(told, soft_wrap=True)
    if report["batch_dependent"]:
        console.print("batch statistics: pass micro_batch= to Trainer; no plan changes it")
    if (found := report["verify"]) is not None:
        console.print(_verdict(found), soft_wrap=True)
    if report["dependencies"] is not None:
        show_dependencies(console, report["dependencies"])


def _verdict(found: dict[str, Any]) -> str:
    if found["finding"] is not None:
        return f"against plain PyTorch: WRONG: {found['finding']}"
    left_out = "".join(f"\nnot compared: {each}" for each in found["left_out"])
    if found["loss_error"] is None:
        return f"against plain PyTorch: checked without data{left_out}"
    worst = f" ({found['parameter']})" if found["parameter"] else ""
    return (
        f"against plain PyTorch, on {found['samples']} samples: loss error {found['loss_error']:.1e}, largest gradient "
        f"error {found['gradient_error']:.1e} of the largest gradient{worst}{left_out}"
    )


def show_dependencies(console: PlainConsole, dependencies: list[dict[str, Any]]) -> None:
    """Print the tracer's findings: what, where, names, what to do."""
    if not dependencies:
        console.print("hidden dependencies: none found in a dry run of the step")
    for each in dependencies:
        sections, names = ", ".join(map(str, each["sections"])), each["names"]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        lines = (
            f"hidden dependency ({each['kind']}): {each['operation']}",
            f"  where: {each['where']}",
            f"  sections: {sections}",
            f"  names: {', '.join(names[:_NAMES_SHOWN])}{more}",
            f"  what to do: {each['remedy']}",
        )
        console.print("\n".join(lines), soft_wrap=True)


def _verified(spec: "JobSpec") -> dict[str, Any]:
    """The check before step 0: figures, or what is wrong."""
    from varuna.checks.mixing import check_mixing

    try:
        check_mixing(
            spec.partitioned,
            spec.fixed_micro_batch,
            accepted=spec.loss.per_micro_batch,
            weighed=spec.loss.weight is not None,
        )
        checked = spec.checks.compare(spec.partitioned, spec.beginning().whole_model())
    except (ModelError, DataError) as error:
        return {"finding": str(error)}
    return {
        "finding": None,
        "samples": checked.samples,
        "seconds": checked.seconds,
        "loss_error": None if checked.errors is None else checked.errors.loss,
        "gradient_error": None if checked.errors is None else checked.errors.gradient,
        "parameter": None if checked.errors is None else checked.errors.parameter,
        "left_out": list(checked.left_out),
    }
