"""``varuna manager``, behind the command line: options in, exit code out."""

import sys
from collections.abc import Callable
from pathlib import Path

from varuna.calibration.file import RUN_FILE
from varuna.fleet.clouds.grower import Grower
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.manager.cluster_manager import ClusterManager, ManagerConfig
from varuna.fleet.manager.local_run import to_stdout
from varuna.fleet.manager.loop import Observer
from varuna.fleet.state.fleet import FleetConfig
from varuna.fleet.state.stutter import SLOW_RATIO

FUTILE_S = 1800.0
"""Cables between machines have so long to come back: as long as agents without a manager and a step wait."""


def manage_cluster(
    *,
    run_dir: Path,
    host: str,
    port: int,
    advertised: str,
    workers: int,
    stages: int | None,
    memory_bytes: int | None,
    json_log: Path | None,
    new: bool,
    overwrite: bool,
    checkpoints: str,
    on_event: Observer,
    on_past: Observer,
    on_join: Callable[[str], None],
    grow: Callable[[Callable[[str], None]], Grower] | None = None,
) -> int:
    """Manage a run on other machines; a failure's text goes to standard error. Returns the exit code.

    Raises:
        VarunaError: the manager cannot start.
    """
    from varuna.planner.choose import planner

    plan = planner(memory_bytes=memory_bytes, stages=stages)

    # Other machines than this one compute: what a run knows of them stays with it, over managers' restarts too.
    calibrator = Calibrator(plan, run_dir=run_dir, cache=lambda job: run_dir / RUN_FILE)
    cluster = ClusterManager(
        ManagerConfig(
            run_dir=run_dir,
            host=host,
            port=port,
            advertised=advertised,
            json_log=json_log,
            new=new,
            overwrite=overwrite,
            checkpoints=checkpoints,
        ),
        config=cluster_config(workers),
        planner=calibrator.plan,
        calibrator=calibrator,
        on_event=on_event,
        on_past=on_past,
        write=to_stdout,
    )
    on_join(str(cluster.invite()))
    grower = grow(cluster.manager.warn) if grow is not None else None
    if grower is not None:
        grower.start()
    ended = cluster.manage()
    if grower is not None and ended is not None:
        grower.close()  # gives back what was asked for
    if ended is None:
        print(
            f"varuna: the run continues without its manager; start the same command with {run_dir} to resume "
            "managing it",
            file=sys.stderr,
        )
        return 0
    if ended.exit_code:
        print(f"varuna: {ended.text}", file=sys.stderr)
    return ended.exit_code


def cluster_config(workers: int) -> FleetConfig:
    """How patient a manager is with machines that come by themselves."""
    return FleetConfig(
        workers=workers,
        elastic=True,
        futile_s=FUTILE_S,
        replace=False,
        wait_s=float("inf"),
        suspect_lease_s=2.5,  # agents pass beats on once a second
        slow_ratio=SLOW_RATIO,
        exit_grace_s=0.5,  # an agent reports an exit at once, and its own end has had a moment's grace already
    )
