"""``varuna manager``: an elastic run on machines that come and go."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.cli.shared.managing import cluster_run, manage
from varuna.cli.shared.run_options import RunOptions, takes_options

if TYPE_CHECKING:
    from varuna.fleet.service.cluster_workers import ClusterWorkers
    from varuna.fleet.service.service import ManagerService

EXAMPLES = """Examples:

\b
varuna manager --host 0.0.0.0 --port 7070 --run-dir runs/gpt2
varuna agent 'varuna://...' -- train.py --lr 1e-3     on each machine
varuna join-token --uses 100 --hours 72               for machines to come
"""


@takes_options
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
    *,
    how: RunOptions,
    checkpoints: Annotated[
        str, typer.Option(metavar="PLACE", help="Only allow checkpoints in this place or below.")
    ] = "",
) -> None:
    """Manage a run on other machines, each of which runs `varuna agent`.

    Prints a JOIN string that admits one machine; `varuna join-token` prints more.
    SIGTERM stops the manager but not the training, and the same command resumes
    the run. Ctrl-C stops the run after the current step.
    """
    how.check()

    def invite(service: "ManagerService[ClusterWorkers]") -> None:
        print(f"JOIN {service.workers.invite()}", flush=True)

    settings = how.settings(run_dir, host=host, port=port, checkpoints=checkpoints)
    again = f"start the same command with {run_dir}"
    run = cluster_run(how, settings, advertise=advertise, workers=workers, again=again)
    raise typer.Exit(manage(run, invite))
