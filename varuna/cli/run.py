"""``varuna run``: an elastic run, on this machine or on an engine that has others."""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from varuna.cli.cluster.engine_options import EngineNodes, engine_values, more_engines
from varuna.cli.shared import options
from varuna.cli.shared.last_export import export_cut_short
from varuna.core.errors import UsageError
from varuna.process.console import say
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
    stages: options.Stages = None,
    memory_per_worker: options.MemoryPerWorker = None,
    calibration: options.PlannedFrom = None,
    price: options.Price = None,
    on_demand_price: options.OnDemandPrice = None,
    max_cost: options.MaxCost = None,
    max_hours: options.MaxHours = None,
    json_log: options.JsonLog = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep logs and journal here. Default: only if the run fails; with --on or a budget: varuna-run.",
        ),
    ] = None,
    new: options.New = False,
    overwrite: options.Overwrite = False,
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
    options.check_replacing(new, overwrite)
    memory_bytes = options.memory_bytes_of(memory_per_worker)
    given = options.calibration_of(calibration)
    priced, budget = options.price_of(price, on_demand_price, given), options.budget_of(max_cost, max_hours)
    if on == _LOCAL and more_engines(context):
        raise UsageError("--on local has no other engine beside it: start an agent on this machine (varuna agent)")
    if on != _LOCAL:
        from varuna.cli.cluster.engine_run import EngineRun, manage_on_engine

        started = EngineRun(
            engines=(EngineNodes(on, nodes, engine_values(context)), *more_engines(context)),
            script=script,
            args=tuple(args or ()),
            workers=workers,
            run_dir=run_dir or _KEPT_HERE,
            port=port,
            advertise=advertise,
            stages=stages,
            memory_bytes=memory_bytes,
            given=given,
            price=priced,
            budget=budget,
            json_log=json_log,
            new=new,
            overwrite=overwrite,
            dry_run=dry_run,
        )
        raise typer.Exit(manage_on_engine(started))
    for flag, is_given in (("--nodes", nodes), ("--advertise", advertise), ("--dry-run", dry_run)):
        if is_given:
            raise UsageError(f"{flag} needs an engine: --on NAME, such as --on aws:trainers")
    count = workers or default_workers()
    run_dir = run_dir or (None if budget is None else _KEPT_HERE)  # what was spent must be known to the next start
    # Workers plan nothing, but need not measure either.
    environment = {"VARUNA_CALIBRATION": str(calibration.absolute())} if given is not None and calibration else {}

    from varuna.calibration.cache import cache_file
    from varuna.fleet.manager.calibrator import Calibrator
    from varuna.fleet.service.local_workers import LocalLaunch
    from varuna.fleet.service.service import ManagerService, ServiceConfig
    from varuna.fleet.state.config import FleetConfig
    from varuna.observe.run_view import RunView
    from varuna.observe.terminal import beside_a_script
    from varuna.planner.choose import planner
    from varuna.process.output_pump import unread_allowed

    with unread_allowed(), ExitStack() as closing:
        progress, write = beside_a_script()
        closing.enter_context(progress)
        view = RunView(progress)
        folder = run_dir or Path(tempfile.mkdtemp(prefix="varuna-run-"))
        calibrator = Calibrator(
            planner(memory_bytes=memory_bytes, stages=stages),
            run_dir=folder,
            cache=cache_file,
            given=given,
            most_workers=count,
        )
        is_over = True  # a folder of the run's own is kept only if the run fails
        try:
            service = ManagerService(
                ServiceConfig(
                    run_dir=folder,
                    port=port,
                    json_log=json_log,
                    new=new,
                    overwrite=overwrite,
                    price=priced,
                    budget=budget,
                ),
                LocalLaunch(script, args or [], environment=environment, is_kept=run_dir is not None),
                config=FleetConfig(workers=count),
                planner=calibrator.plan,
                calibrator=calibrator,
                on_event=view,
                write=write,
            )
            is_over = False
            view.watch(lambda: service.manager.fleet, service.glance)
            ended = service.manage()
            assert ended is not None  # nobody tells this manager to leave
            view.close(ended, service.checkpoint, service.spent)
            is_over = ended.exit_code == 0
        finally:
            if is_over and run_dir is None:
                shutil.rmtree(folder, ignore_errors=True)
        if ended.exit_code:
            say(f"logs are kept in {folder}")
            say(ended.text)
        export_cut_short(service, ended)
    raise typer.Exit(ended.exit_code)
