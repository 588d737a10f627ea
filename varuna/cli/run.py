"""``varuna run``: an elastic run, on this machine or on an engine that has others."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from varuna.cli.cluster.engine_options import EngineNodes, engine_values, more_engines
from varuna.cli.shared import options
from varuna.cli.shared.managing import ManagedRun, manage
from varuna.cli.shared.run_options import RunOptions, takes_options
from varuna.core.errors import UsageError
from varuna.process.gpus import default_workers

EXAMPLES = """Examples:

\b
varuna run --workers 4 train.py
varuna run --workers 4 --memory-per-worker 2GiB train.py --lr 1e-3
varuna run --workers 4 --stages 2 --json-log steps.jsonl train.py
varuna run --on aws:trainers --nodes 4:32 train.py
varuna run --on aws:trainers --nodes 4:32 --price 0.69 --max-cost 20 train.py
varuna run --on aws:a100s --nodes 2:8 --on aws:t4s --nodes 0:32 train.py
varuna run --on aws --help                   the options of this engine
"""
_LOCAL = "local"
_KEPT_HERE = Path("varuna-run")


@takes_options
def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Training script: the same file that runs with `python train.py`.")],
    args: options.ScriptArguments = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=1,
            help="Worker processes to keep alive (on each node). Default: one per GPU, else 1.",
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="Where to run: this machine (local), or what starts agents on others (see below). Again, with its own "
            "--nodes and options, for more machines of another kind or place.",
        ),
    ] = _LOCAL,
    nodes: Annotated[
        str, typer.Option(metavar="LEAST:MOST", help="With --on: nodes to wait for at the start, and to ask for.")
    ] = "",
    *,
    how: RunOptions,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep logs and journal here. Default: only if the run fails; with --on or a budget: varuna-run.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the status page and of agents; 0 picks a free one.")
    ] = 0,
    advertise: Annotated[
        str, typer.Option(metavar="ADDRESS", help="With --on: address of this machine that nodes reach it by.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --on: show what would be asked of a cloud, and change nothing.")
    ] = False,
) -> None:
    """Train SCRIPT on N local workers, or on nodes of an engine; those that die are replaced.

    Only the main worker's standard output is shown. Progress, morphs and warnings
    go to standard error. With checkpoints= in the script, the same command
    resumes. Ctrl-C stops after the current step; a second Ctrl-C stops at once.
    """
    options.check_misplaced(context, script, args or [])
    how.check()
    if on == _LOCAL and more_engines(context):
        raise UsageError("--on local has no other engine beside it: start an agent on this machine (varuna agent)")
    if on != _LOCAL:
        from varuna.cli.cluster.engine_run import EngineRun, manage_on_engine

        started = EngineRun(
            how=how,
            engines=(EngineNodes(on, nodes, engine_values(context)), *more_engines(context)),
            script=script,
            args=tuple(args or ()),
            workers=workers,
            run_dir=run_dir or _KEPT_HERE,
            port=port,
            advertise=advertise,
            dry_run=dry_run,
        )
        raise typer.Exit(manage_on_engine(started))
    for flag, is_given in (("--nodes", nodes), ("--advertise", advertise), ("--dry-run", dry_run)):
        if is_given:
            raise UsageError(f"{flag} needs an engine: --on NAME, such as --on aws:trainers")
    raise typer.Exit(_manage_here(how, script, args or (), workers or default_workers(), run_dir, port))


def _manage_here(
    how: RunOptions, script: Path, args: Sequence[str], workers: int, run_dir: Path | None, port: int
) -> int:
    """Manage local workers to the end; returns the exit code. A folder of the run's own is kept only if it fails."""
    from varuna.calibration.cache import cache_file
    from varuna.fleet.service.local_workers import LocalLaunch
    from varuna.fleet.state.config import FleetConfig

    kept = run_dir or (_KEPT_HERE if how.budget is not None else None)  # what was spent must be known to the next start
    # Workers plan nothing, but need not measure either.
    file = None if how.given is None else how.calibration
    environment = {} if file is None else {"VARUNA_CALIBRATION": str(file.absolute())}
    launch = LocalLaunch(script, args, environment=environment, is_kept=kept is not None)
    folder = kept or Path(tempfile.mkdtemp(prefix="varuna-run-"))
    is_over = True
    try:
        managed = ManagedRun(
            options=how,
            settings=how.settings(folder, port=port),
            launch=launch,
            config=FleetConfig(workers=workers),
            cache=cache_file,
            most_workers=workers,
            tells_folder=True,
        )
        is_over = False
        exit_code = manage(managed)
        is_over = exit_code == 0
    finally:
        if is_over and kept is None:
            shutil.rmtree(folder, ignore_errors=True)
    return exit_code
