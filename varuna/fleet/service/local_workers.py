"""Workers that are processes of this machine, each with a connection over loopback: ``varuna run``."""

import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from starlette.routing import BaseRoute

from varuna.core.messages import ToWorker
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.page.logins import Logins
from varuna.fleet.service.service import Parts, ServiceConfig, page_address
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.run_events import Notice
from varuna.fleet.workers.launcher import Launcher
from varuna.fleet.workers.worker_server import WorkerServer
from varuna.process.scripts import check_script

_STOP_GRACE_S = 2.0
"""Time for dismissed workers to end by themselves."""


@dataclass(frozen=True)
class LocalLaunch:
    """Each worker runs this script; all of them end with their manager.

    Args:
        script: the training script.
        args: its arguments.
        environment: more variables for the workers.
        is_kept: whether the run folder outlives a run that ends well; its owner sees to that.
    """

    script: Path
    args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_kept: bool = True
    outlives = False
    logs = ""

    def __post_init__(self) -> None:
        """Look for the script before a folder is made for its run.

        Raises:
            UsageError: there is none.
        """
        check_script(self.script)

    def open(self, place: ServiceConfig, parts: Parts) -> "LocalWorkers":
        """Build the back end.

        Raises:
            FleetError: the port is taken.
        """
        return LocalWorkers(self, place, parts)


class LocalWorkers:
    """A ``service.BackEnd``; ``kill`` and ``pid`` may be called by any thread."""

    certificate_pem = None

    def __init__(self, launch: LocalLaunch, place: ServiceConfig, parts: Parts) -> None:
        token = secrets.token_urlsafe(24)
        self._launch, self._run_dir, self._rescue = launch, place.run_dir, place.run_dir.absolute() / "rescue"
        shutil.rmtree(self._rescue, ignore_errors=True)  # of a manager that was killed
        self._server = WorkerServer(
            host=place.host,
            port=place.port,
            token=token,
            is_ours=lambda name: self._launcher.has_started(name),
            on_event=parts.mailbox.post,
        )
        self.access_host, self.port = self._server.host, self._server.port
        self._launcher = Launcher(
            [str(launch.script), *launch.args],
            environment={
                **launch.environment,
                "VARUNA_MANAGER": self._server.worker_url,
                "VARUNA_TOKEN": token,
                "VARUNA_RESCUE": str(self._rescue),
                "VARUNA_CHART": parts.run,
            },
            run_dir=place.run_dir,
            on_exit=parts.mailbox.post,
            write=parts.write,
        )
        with suppress(OSError):  # what a full disk does to checkpoints, workers say
            self._rescue.mkdir(mode=0o700)
        self.kill, self.set_main = self._launcher.kill, self._launcher.set_main
        self.pid = self._launcher.pid

    def spawn(self, avoided: Collection[str]) -> str:
        """Start a worker, on a GPU that none of these workers had; returns its name."""
        return self._launcher.spawn(avoided=avoided)

    def send(self, name: str, message: ToWorker) -> None:
        """Tell a worker."""
        self._server.send(name, message)

    def release(self, node: str, *, drained: bool) -> None:
        """Its workers end by themselves; this machine stays."""

    def heard_s(self) -> float | None:
        """The newest moment at which workers could be heard."""
        return self._server.ran_s

    def operator_api(self, plain: OperatorApi) -> OperatorApi:
        """Return ``plain``: no other machine can join, so there is nothing more to do."""
        return plain

    def status(self) -> dict[str, object]:
        """The fleet says it all."""
        return {}

    def introduction(self, logins: Logins) -> list[Notice]:
        """Say where logs and the page are."""
        until = "" if self._launch.is_kept else " until the run succeeds (--run-dir keeps them)"
        page = page_address("http", self.access_host, self.port, logins)
        return [Notice(text=f"logs in {self._run_dir}{until}"), Notice(text=f"page at {page}")]

    def start(self, routes: Sequence[BaseRoute]) -> None:
        """Open the port."""
        self._server.start(routes)

    def leave(self, ended: Ended | None) -> str:
        """Leave no process running."""
        return self._launcher.stop_all(_STOP_GRACE_S)

    def close(self) -> None:
        """Give back the port, and drop what was kept for this run alone."""
        self._server.stop()
        shutil.rmtree(self._rescue, ignore_errors=True)
