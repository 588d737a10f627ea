"""Options that several commands share, so that they mean and say the same everywhere."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.core.errors import UsageError
from varuna.core.units import parse_bytes
from varuna.process.console import warn
from varuna.process.scripts import may_read_arguments

if TYPE_CHECKING:
    from varuna.calibration.format import Calibrations
    from varuna.fleet.state.run_events import Budgeted, Priced

_ON_RAY = "ray:"


def _folder_of(run: Path | None) -> Path | None:
    """The folder of a run; one that runs in a Ray cluster gets a folder here, which says where its manager is."""
    if run is None or not str(run).startswith(_ON_RAY):
        return run
    from varuna.core.extras import extras
    from varuna.fleet.run_folder.connection_file import keep_copy

    name = str(run).removeprefix(_ON_RAY)
    [access_of] = extras("runs elsewhere")
    return keep_copy(f"ray-{name}", access_of(name))


Stages = Annotated[
    int | None,
    typer.Option(min=1, envvar="VARUNA_STAGES", help="Number of pipeline stages P. Default: the planner's choice."),
]
MemoryPerWorker = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", envvar="VARUNA_MEMORY_PER_WORKER", help="Memory that plans must fit into, such as 2GiB."
    ),
]
PlannedFrom = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        envvar="VARUNA_CALIBRATION",
        help="Plan from this calibration of the job. Default: what this machine remembers of it, else some seconds of "
        "measuring; `none` measures nothing.",
    ),
]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Examples per micro-batch. Default: the planner's choice.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="GPUs per machine, if not the calibration's.")]
Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0,
        metavar="DOLLARS",
        help="What a worker costs per hour: the run then says what it has cost. Default: the calibration's, if it is "
        "given and has one.",
    ),
]
OnDemandPrice = Annotated[
    float | None,
    typer.Option(
        "--on-demand-price",
        min=0,
        metavar="DOLLARS",
        help="What a worker that nobody takes back would cost per hour, for comparison.",
    ),
]
MaxCost = Annotated[
    float | None,
    typer.Option(
        "--max-cost",
        metavar="DOLLARS",
        help="End with a checkpoint and an exported model before the run has cost more, at --price per worker and "
        "hour; all starts in the same --run-dir count.",
    ),
]
MaxHours = Annotated[
    float | None,
    typer.Option(
        "--max-hours",
        metavar="HOURS",
        help="End with a checkpoint and an exported model before the run has taken longer by the clock; all starts in "
        "the same --run-dir count.",
    ),
]
JsonLog = Annotated[Path | None, typer.Option(metavar="FILE", help="Append one JSON line per committed step.")]
New = Annotated[bool, typer.Option("--new", help="Start afresh instead of resuming from checkpoints.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="With --new: move existing checkpoints aside.")]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        envvar="VARUNA_RUN",
        callback=_folder_of,
        help="Folder of the run, or ray:NAME in a Ray cluster. Default: your running or newest run.",
    ),
]
JobScript = Annotated[Path, typer.Argument(help="Training script; it runs until it asks its Trainer for steps.")]
ScriptArguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def memory_bytes_of(memory_per_worker: str | None) -> int | None:
    """Bytes of ``--memory-per-worker``; None without it.

    Raises:
        UsageError: not a size.
    """
    return parse_bytes(memory_per_worker, "--memory-per-worker") if memory_per_worker else None


def calibration_of(file: Path | None) -> "Calibrations | None":
    """Read the calibration that ``--calibration`` of a run names; None without it, and for ``none``.

    Raises:
        UsageError: it is no calibration.
    """
    from varuna.calibration.file import read_calibration

    return None if file is None or str(file) == "none" else read_calibration(file)


def price_of(price: float | None, on_demand_price: float | None, given: "Calibrations | None") -> "Priced | None":
    """Return the price of a worker; None if nobody says.

    Raises:
        UsageError: not a price, or nothing to compare it with.
    """
    from varuna.fleet.state.run_events import Priced

    for flag, value in (("--price", price), ("--on-demand-price", on_demand_price)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{flag} {value} is not a price. Give dollars per worker and hour, such as 0.61")
    if price is None and given is not None:
        price = given.first.hardware.price_per_hour
    if price is not None:
        return Priced(per_hour=price, on_demand_per_hour=on_demand_price)
    if on_demand_price is not None:
        raise UsageError("--on-demand-price is for comparison: give --price, which workers of this run cost, too")
    return None


def budget_of(max_cost: float | None, max_hours: float | None) -> "Budgeted | None":
    """Return the limits on what a run may use up; None if nobody says.

    Raises:
        UsageError: not a budget.
    """
    from varuna.fleet.state.run_events import Budgeted

    for flag, value, unit in (("--max-cost", max_cost, "dollars"), ("--max-hours", max_hours, "hours")):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} {value:g} is no budget. Give {unit} above 0, such as {flag} 20, or leave it out")
    if max_cost is None and max_hours is None:
        return None
    return Budgeted(max_dollars=max_cost, max_hours=max_hours)


def check_replacing(new: bool, overwrite: bool) -> None:
    """Refuse ``--overwrite`` alone, which would be ignored.

    Raises:
        UsageError: it was given without ``--new``.
    """
    if overwrite and not new:
        raise UsageError("--overwrite requires --new: give both, --new --overwrite, or neither")


def write_picture(svg: Path, picture: str) -> None:
    """Write what ``--svg`` asked for.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        svg.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {svg}: {error.strerror}. Give another --svg file.") from error


def check_misplaced(context: typer.Context, script: Path, args: Sequence[str]) -> None:
    """Say which options of this command stand after the script, unless its text names them: they are its own then.

    What follows ``--`` is the script's for certain. A script that is not there is somebody else's complaint.

    Raises:
        UsageError: the script reads no arguments, so they would be lost.
    """
    if "--" in args or not script.is_file():
        return
    ours = {name for param in context.command.params for name in (*param.opts, *param.secondary_opts)} - {"--help"}
    text = script.read_text(errors="replace")
    found = [name for name in dict.fromkeys(arg.partition("=")[0] for arg in args) if name in ours]
    found = [name for name in found if name not in text]
    if not found:
        return
    names, stand = " and ".join(found), "stands" if len(found) == 1 else "stand"
    move = f"Options of varuna come before the script: varuna {context.info_name} {' '.join(found)} ... {script}"
    if not may_read_arguments(script, text):
        raise UsageError(f"{names} {stand} after {script}, which reads no arguments. {move}")
    warn(f"{names} {stand} after {script}, so only the script sees it. {move}")
