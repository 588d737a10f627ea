"""``varuna replay``: how a run would have done on a recorded cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from varuna.cli.shared import options
from varuna.core.units import counted, format_duration

if TYPE_CHECKING:
    from varuna.extras.replay.report import ReplayOutcome

_LEAST_LOST = 0.0005


def replay(
    trace: Annotated[Path, typer.Argument(help="CSV of `time, add|remove, node` or `time, number of nodes`; or JSON.")],
    calibration: Annotated[Path, typer.Option(metavar="FILE", help="Calibration of the model on the hardware.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Examples per step.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Number of workers per node.")] = 1,
    micro_batch: options.MicroBatch = None,
    recovery: Annotated[
        Literal["morph", "restart"],
        typer.Option(
            help="morph; or restart, which kills all workers and reads the last checkpoint, with morph for comparison."
        ),
    ] = "morph",
    time_unit: Annotated[
        Literal["ms", "s", "min", "h"] | None,
        typer.Option(help="Unit of times that are numbers. Default: found from the recording."),
    ] = None,
    notice: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How early a node gives notice.")] = 0.0,
    as_json: options.AsJson = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw examples per second over time.")] = None,
) -> None:
    """Replay a recorded cluster in virtual time, with the real state machine and planner.

    Goodput is the number of committed examples relative to a run that is always
    on the best plan and whose morphs cost nothing.
    """
    from varuna.calibration.file import read_calibration
    from varuna.extras.replay.figure import draw
    from varuna.extras.replay.recording import read_trace
    from varuna.extras.replay.replay import Replay

    known = read_calibration(calibration)
    recorded = read_trace(trace, time_unit)
    cluster = Replay(recorded, known, gpus_per_node=gpus_per_node, global_batch=global_batch, micro_batch=micro_batch)
    morphing = cluster.morphing(notice_s=notice)
    outcomes = [morphing] if recovery == "morph" else [cluster.restarting(), morphing]
    if svg is not None:
        title = f"{known.first.model.name} on {known.first.hardware.name}, {trace.name}, policy {outcomes[0].policy}"
        options.write_picture(svg, draw(outcomes[0], gpus_per_node, title))
    if as_json:
        first = outcomes[0].describe()
        print(json.dumps(first if len(outcomes) == 1 else {**first, "beside": outcomes[1].describe()}, indent=2))
    else:
        lasts = f"{format_duration(recorded.end_s)}, at most {counted(recorded.most_nodes, 'node')}"
        print(f"{trace.name}: {lasts}; times read as {recorded.clock}")
        for outcome in outcomes:
            print(_sentences(outcome))


def _sentences(outcome: "ReplayOutcome") -> str:
    plans = ", ".join(f"{shape} {100 * share:.0f} %" for shape, share in list(outcome.plans.items())[:8])
    morphs = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.morphs.items()))
    kept = ""
    if outcome.micro_batches_kept:
        kept = f" (without {outcome.micro_batches_kept / outcome.micro_batches:.1f} steps' worth of micro-batches)"
    price = "" if outcome.dollars is None else f", {outcome.dollars:,.0f} dollars"
    return (
        f"policy {outcome.policy}: goodput {100 * outcome.goodput:.1f} % of instant lossless morphs\n  "
        f"{outcome.samples:,} samples in {outcome.steps:,} steps of {outcome.global_batch} (m = "
        f"{outcome.micro_batch}), {outcome.steps_redone} steps repeated{kept}\n  "
        f"{format_duration(outcome.duration_s)}, training {100 * outcome.training_share:.1f} % of it; "
        f"{outcome.gpu_hours:,.1f} GPU-hours{price}\n  "
        f"generations: {morphs or 'none'}; checkpoints: {len(outcome.checkpoints_s)}\n  time by plan (P x D): "
        f"{plans}{_lost(outcome)}"
    )


def _lost(outcome: "ReplayOutcome") -> str:
    """List the causes of what was lost, with their shares; nothing that rounds to 0."""
    shares = sorted(outcome.lost.items(), key=lambda each: -each[1])
    lost = ", ".join(f"{cause} {100 * share:.1f} %" for cause, share in shares if abs(share) >= _LEAST_LOST)
    return f"\n  lost: {lost}" if lost else ""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(replay)
