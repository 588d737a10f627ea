"""Management of a run to its end, as ``varuna run`` and ``varuna manager`` share it."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from varuna.cli.shared.last_export import export_cut_short
from varuna.cli.shared.run_options import RunOptions
from varuna.core.errors import FleetError
from varuna.process.console import say, warn

if TYPE_CHECKING:
    from varuna.core.model import JobFacts
    from varuna.fleet.engines.growers import Growers
    from varuna.fleet.service.cluster_workers import ClusterWorkers
    from varuna.fleet.service.service import Launch, ManagerService, ServiceConfig
    from varuna.fleet.state.config import FleetConfig

_EXPECTED_WORKERS = 8
"""Micro-batches, which keep their size, are small enough for so many workers, however few begin."""
B = TypeVar("B", bound=Any)


@dataclass(frozen=True, kw_only=True)
class ManagedRun(Generic[B]):
    """A run to be managed.

    Args:
        options: how it is planned.
        settings: of its manager.
        launch: where its workers live.
        config: how many are waited for, and how patiently.
        cache: file in which calibrations are kept, by job and class of device.
        most_workers: that micro-batches are made small enough for.
        again: how the same command is called where a message says that it continues the run.
        tells_folder: a failed run says where its logs are.
    """

    options: RunOptions
    settings: "ServiceConfig"
    launch: "Launch[B]"
    config: "FleetConfig"
    cache: "Callable[[JobFacts, str], Path]"
    most_workers: int
    again: str = ""
    tells_folder: bool = False


def cluster_run(
    options: RunOptions, settings: "ServiceConfig", *, advertise: str, workers: int, again: str
) -> "ManagedRun[ClusterWorkers]":
    """Return a run on machines that come and go.

    Args:
        options: how it is planned.
        settings: of its manager.
        advertise: address at which agents reach it; empty: the one that it listens on, or this machine's own.
        workers: to wait for before the first step.
        again: how the same command is called.
    """
    from varuna.calibration.file import RUN_FILE
    from varuna.fleet.service.cluster_workers import ClusterLaunch, cluster_config

    folder = settings.run_dir
    return ManagedRun(
        options=options,
        settings=replace(settings, port=settings.port or _port_before(folder, settings.host)),
        launch=ClusterLaunch(advertise),
        config=cluster_config(workers),
        # Other machines than this one compute: what a run knows of them stays with it, over managers' restarts too.
        cache=lambda job, device_class: folder / RUN_FILE,
        most_workers=max(workers, _EXPECTED_WORKERS),
        again=again,
    )


def manage(run: ManagedRun[B], attach: "Callable[[ManagerService[B]], Growers | None]" = lambda service: None) -> int:
    """Manage to the end, and tell it; return the exit code, 0 if the run continues without this manager.

    Args:
        run: what.
        attach: sees the manager before anybody is let in; what it returns asks for machines, until the run is over.
    """
    from varuna.fleet.manager.calibrator import Calibrator
    from varuna.fleet.service.service import ManagerService
    from varuna.observe.run_view import RunView
    from varuna.observe.terminal import beside_a_script
    from varuna.planner.choose import planner
    from varuna.process.output_pump import unread_allowed

    with unread_allowed(), ExitStack() as closing:
        progress, write = beside_a_script()
        closing.enter_context(progress)
        view = RunView(progress)
        calibrator = Calibrator(
            planner(memory_bytes=run.options.memory_bytes, stages=run.options.stages),
            run_dir=run.settings.run_dir,
            cache=run.cache,
            given=run.options.given,
            most_workers=run.most_workers,
        )
        service = ManagerService(
            run.settings,
            run.launch,
            config=run.config,
            planner=calibrator.plan,
            calibrator=calibrator,
            on_event=view,
            on_past=view.recall,
            write=write,
        )
        growers = attach(service)
        view.watch(lambda: service.manager.fleet, service.glance)
        ended = None
        is_interrupted = False
        try:
            if growers is not None:
                growers.start()
            ended = service.manage()
        except KeyboardInterrupt:  # in the moment before the manager listens to signals
            is_interrupted = True
            raise
        finally:
            if growers is not None and (ended is not None or is_interrupted):
                _give_back(growers)
        view.close(ended, service.checkpoint, service.spent)
        if ended is None:
            say(f"the run continues without its manager; {run.again} to resume managing it")
        elif ended.exit_code:
            if run.tells_folder:
                say(f"logs are kept in {run.settings.run_dir}")
            say(ended.text)
        if ended is not None:
            export_cut_short(service, ended)
    return 0 if ended is None else ended.exit_code


def _give_back(growers: "Growers") -> None:
    """Let go of what was asked for; a run that is over is over in any case."""
    try:
        growers.close()
    except FleetError as error:
        say(str(error))


def _port_before(run_dir: Path, host: str) -> int:
    """The port of the manager before this one, where its agents look for it; 0, which picks one, if it is not free."""
    from varuna.fleet.run_folder.connection_file import read_access
    from varuna.process.file_lock import is_owned

    known = read_access(run_dir)
    if known is None:
        return 0
    if is_owned(run_dir):  # by a manager that is just leaving, or one that is named soon
        return known.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, known.port))
        except OSError as error:
            warn(
                f"port {known.port}, at which agents of {run_dir} look for their manager, cannot be used again "
                f"({error.strerror}): of those that still run, only those with --join-file {run_dir}/join find this "
                "one. --port names another port."
            )
            return 0
    return known.port
