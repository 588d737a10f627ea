"""``varuna replay``: how a run would have done on a recorded cluster."""

import json
from pathlib import Path

import typer

from varuna.calibration.format import Calibration
from varuna.core.errors import UsageError
from varuna.core.units import format_duration
from varuna.replay.figure import draw
from varuna.replay.replay import Replay
from varuna.replay.report import ReplayOutcome
from varuna.replay.trace import read_trace


def replay_trace(
    trace: Path,
    calibration: Calibration,
    *,
    gpus_per_node: int,
    global_batch: int,
    micro_batch: int | None,
    policy: str,
    notice_s: float,
    as_json: bool,
    svg: Path | None,
) -> None:
    """Replay and print; with ``policy="restart"`` both, side by side.

    Raises:
        UsageError: the trace or the SVG file cannot be used.
        NoPlanError: the whole cluster could not run the job.
    """
    replay = Replay(
        read_trace(trace),
        calibration,
        gpus_per_node=gpus_per_node,
        global_batch=global_batch,
        micro_batch=micro_batch,
    )
    morphing = replay.morphing(notice_s=notice_s)
    outcomes = [morphing] if policy == "morph" else [replay.restarting(), morphing]
    if svg is not None:
        title = f"{calibration.model.name} on {calibration.hardware.name}, {trace.name}, policy {outcomes[0].policy}"
        try:
            svg.write_text(draw(outcomes[0], gpus_per_node, title))
        except OSError as error:
            raise UsageError(f"cannot write {svg}: {error.strerror}. Give another --svg file.") from error
    if as_json:
        first = outcomes[0].describe()
        typer.echo(json.dumps(first if len(outcomes) == 1 else {**first, "beside": outcomes[1].describe()}, indent=2))
    else:
        for outcome in outcomes:
            typer.echo(_sentences(outcome))


def _sentences(outcome: ReplayOutcome) -> str:
    plans = ", ".join(f"{shape} {100 * share:.0f} %" for shape, share in list(outcome.plans.items())[:8])
    morphs = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.morphs.items()))
    price = "" if outcome.dollars is None else f", {outcome.dollars:,.0f} dollars"
    return (
        f"policy {outcome.policy}: goodput {100 * outcome.goodput:.1f} % of instant lossless morphs\n  "
        f"{outcome.samples:,} samples in {outcome.steps:,} steps of {outcome.global_batch} (m = "
        f"{outcome.micro_batch}), {outcome.steps_redone} steps repeated\n  {format_duration(outcome.duration_s)}, "
        f"training {100 * outcome.training_share:.1f} % of it; {outcome.gpu_hours:,.1f} GPU-hours{price}\n  "
        f"generations: {morphs or 'none'}; checkpoints: {len(outcome.checkpoints_s)}\n  time by plan (P x D): "
        f"{plans}"
    )
