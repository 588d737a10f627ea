"""Options that several commands share, so that they mean and say the same everywhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from varuna.core.errors import UsageError
from varuna.core.units import parse_bytes
from varuna.process.console import warn
from varuna.process.scripts import may_read_arguments

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


MicroBatch = Annotated[int | None, typer.Option(min=1, help="Examples per micro-batch. Default: the planner's choice.")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="GPUs per machine, if not the calibration's.")]
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
