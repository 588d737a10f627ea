"""``varuna manager``: an elastic run on machines that come and go."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.cli import options
from varuna.core.errors import UsageError
from varuna.process.console import say

if TYPE_CHECKING:
    from varuna.fleet.clouds.grower import Grower

_EXPECTED_WORKERS = 8
"""Micro-batches, which keep their size, are small enough for so many workers, however few begin."""

EXAMPLES = """Examples:

\b
varuna manager --host 0.0.0.0 --port 7070 --run-dir runs/gpt2
varuna agent 'varuna://...' -- train.py --lr 1e-3     on each machine
varuna join-token --uses 100 --hours 72               for machines to come
"""


def manager(
    run_dir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of journal, keys and logs; the same folder again continues the run."),
    ] = Path("varuna-run"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 0,
    advertise: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address at which agents reach this machine, if it is not --host.")
    ] = "",
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-n", min=1, help="Number of workers to wait for (at most a minute) before the first step."
        ),
    ] = 1,
    stages: options.Stages = None,
    memory_per_worker: options.MemoryPerWorker = None,
    calibration: options.PlannedFrom = None,
    asg: Annotated[
        str,
        typer.Option(metavar="GROUP", help="AWS Auto Scaling group to ask for machines; its VMs must start agents."),
    ] = "",
    nodes: Annotated[str, typer.Option(metavar="LEAST:MOST", help="With --asg: least and most machines.")] = "",
    checkpoints: Annotated[
        str, typer.Option(metavar="PLACE", help="Only allow checkpoints in this place or below.")
    ] = "",
    json_log: options.JsonLog = None,
    new: options.New = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Manage a run on other machines, each of which runs `varuna agent`.

    Prints a JOIN string that admits one machine; `varuna join-token` prints more.
    SIGTERM stops the manager but not the training, and the same command resumes
    the run. Ctrl-C stops the run after the current step.
    """
    options.check_replacing(new, overwrite)
    memory_bytes = options.memory_bytes_of(memory_per_worker)
    given = options.calibration_of(calibration)

    grow = _grower(asg, nodes, run_dir)

    from varuna.calibration.file import RUN_FILE
    from varuna.fleet.manager.calibrator import Calibrator
    from varuna.fleet.service.cluster_workers import ClusterLaunch, cluster_config
    from varuna.fleet.service.service import ManagerService, ServiceConfig
    from varuna.observe.run_view import RunView
    from varuna.observe.terminal import beside_a_script
    from varuna.planner.choose import planner
    from varuna.process.output_pump import unread_allowed

    with unread_allowed(), ExitStack() as closing:
        progress, write = beside_a_script()
        closing.enter_context(progress)
        view = RunView(progress)
        # Other machines than this one compute: what a run knows of them stays with it, over managers' restarts too.
        calibrator = Calibrator(
            planner(memory_bytes=memory_bytes, stages=stages),
            run_dir=run_dir,
            cache=lambda job: run_dir / RUN_FILE,
            given=given,
            most_workers=max(workers, _EXPECTED_WORKERS),
        )
        service = ManagerService(
            ServiceConfig(
                run_dir=run_dir,
                host=host,
                port=port,
                json_log=json_log,
                new=new,
                overwrite=overwrite,
                checkpoints=checkpoints,
            ),
            ClusterLaunch(advertise),
            config=cluster_config(workers),
            planner=calibrator.plan,
            calibrator=calibrator,
            on_event=view,
            on_past=view.recall,
            write=write,
        )
        print(f"JOIN {service.workers.invite()}", flush=True)
        grower = grow(service.mailbox.warn) if grow is not None else None
        if grower is not None:
            grower.start()
        view.watch(lambda: service.manager.fleet)
        ended = service.manage()
        if grower is not None and ended is not None:
            grower.close()  # gives back what was asked for
        view.close(ended, service.checkpoint)
        if ended is None:
            say(f"the run continues without its manager; start the same command with {run_dir} to resume managing it")
        elif ended.exit_code:
            say(ended.text)
    raise typer.Exit(0 if ended is None else ended.exit_code)


def _grower(asg: str, nodes: str, run_dir: Path) -> "Callable[[Callable[[str], None]], Grower] | None":
    """A function that makes the machines' grower from a listener to refusals; None if no group is given."""
    if not asg and not nodes:
        return None
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", nodes)
    if not asg or found is None:
        raise UsageError("--asg GROUP and --nodes LEAST:MOST go together, such as --asg trainers --nodes 4:32")
    from varuna.fleet.clouds.aws import AutoScalingProvider
    from varuna.fleet.clouds.grower import Grower
    from varuna.fleet.clouds.growth import GrowthConfig
    from varuna.fleet.clouds.original_size import OriginalSize

    config = GrowthConfig(least=int(found[1]), most=int(found[2]))
    provider = AutoScalingProvider(asg, before=OriginalSize(run_dir, asg))

    def grow(warn: Callable[[str], None]) -> Grower:
        grower = Grower(provider, config, warn=warn)
        grower.want(config.most)
        return grower

    return grow
