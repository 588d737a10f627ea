"""An elastic run on this machine, from its first process to its end."""

import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from varuna.core.errors import FleetError, UsageError
from varuna.core.messages import ToWorker
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator
from varuna.fleet.manager.loop import Manager, Observer
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.manager.status import Picture
from varuna.fleet.net.ca import make_private
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.connection_file import Access, publish
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.state.fleet import Ended, FleetConfig, Running
from varuna.fleet.state.inputs import Event, FinishRequested, SpawnRequested, StopRequested
from varuna.fleet.state.questions import Planner
from varuna.fleet.state.run_events import Notice, RunEvent
from varuna.fleet.workers.launcher import Launcher
from varuna.fleet.workers.worker_server import WorkerServer
from varuna.process.file_lock import own
from varuna.process.scripts import check_script
from varuna.process.signals import INTERRUPTED, handled

_STOP_GRACE_S = 2.0
"""Time for dismissed workers to end by themselves."""


class LocalRun:
    """One elastic run of a script; ``start_and_wait`` may be called once.

    ``kill``, ``spawn``, ``worker_of`` and ``stop`` may be called by any thread, ``on_event`` included.

    Args:
        script: the training script.
        args: its arguments.
        config: how many workers, and how patient to be.
        planner: plan for a number of workers.
        run_dir: where logs and the journal go.
        kept: whether that folder outlives a run that ends well; its owner sees to that.
        json_log: file that gets a line per committed step.
        new: start afresh instead of resuming.
        overwrite: with ``new``: move existing checkpoints aside.
        port: of the manager on loopback; 0 picks a free one.
        on_event: sees every event, on the thread of ``start_and_wait``.
        write: gets the main worker's standard output, line by line.
        environment: more variables for the workers.
        calibrator: hears what steps take.

    Raises:
        FleetError: the port is taken.
        UsageError: the script, the log or the folder cannot be used.
    """

    def __init__(
        self,
        script: Path,
        args: Sequence[str] = (),
        *,
        config: FleetConfig,
        planner: Planner,
        run_dir: Path,
        kept: bool = True,
        json_log: Path | None = None,
        new: bool = False,
        overwrite: bool = False,
        port: int = 0,
        on_event: Observer = lambda event: None,
        write: Callable[[bytes], None] | None = None,
        environment: dict[str, str] | None = None,
        calibrator: Calibrator | None = None,
    ) -> None:
        check_script(script)
        token, operator_token = (secrets.token_urlsafe(24) for _ in range(2))
        people = OperatorApi(
            status=lambda: self._picture.describe(self.manager.fleet, time.monotonic()),
            logs=run_dir,
            ask=lambda event: self.manager.ask(event),
            audit=Audit(lambda event: self.manager.post(event)),
            operator_token=operator_token,
        )
        self.server = WorkerServer(port=port, token=token, on_event=self._post, routes=people.routes())
        try:
            make_private(run_dir)
            self._ownership = own(run_dir, "manager", remedy="Stop that one, or pass another --run-dir.")
            self._journal = Journal(run_dir, json_log)
            publish(
                run_dir,
                Access(host=self.server.host, port=self.server.port, certificate_pem=None, token=operator_token),
            )
        except FleetError:
            self.server.stop()
            raise
        except OSError as error:
            self.server.stop()
            raise UsageError(f"cannot write {error.filename}: {error.strerror}. Pass another place.") from error
        self._journal.begin(secrets.token_hex(8))
        self._on_event, self._picture, self._is_interrupted = on_event, Picture(), False
        self.launcher = Launcher(
            [str(script), *args],
            environment={**(environment or {}), "VARUNA_MANAGER": self.server.worker_url, "VARUNA_TOKEN": token},
            run_dir=run_dir,
            on_exit=self._post,
            write=write or to_stdout,
        )
        keeper = CheckpointCoordinator(new=new, overwrite=overwrite, warn=lambda text: self.manager.warn(text))
        self.manager = Manager(
            config,
            planner,
            hands=_Hands(self.launcher, self.server),
            journal=self._journal,
            keeper=keeper,
            observer=self._observe,
            calibrator=calibrator,
        )
        self._calibrator = calibrator
        until = "" if kept else " until the run succeeds (--run-dir keeps them)"
        page = f"http://{self.server.host}:{self.server.port}/"
        if sys.stderr.isatty():
            page += f"#login={people.logins.invite()} (works once; `varuna open` opens it again)"
        else:  # what a build server keeps must open nothing
            page += " (`varuna open` prints a link)"
        self._observe(Notice(text=f"logs in {run_dir}{until}, status page at {page}"))

    def start_and_wait(self) -> Ended:
        """Start the workers, manage them to the end, and leave no process running.

        Call it on a thread that outlives the run's workers, such as the main one.
        """
        self.server.start()
        try:
            with handled(self._on_signal):
                try:
                    ended = self.manager.run()
                    assert ended is not None  # nobody tells this manager to leave
                    if self._is_interrupted and ended.exit_code == 0:
                        ended = Ended(128 + signal.SIGINT, f"stopped by SIGINT, {ended.text}")
                    if self._calibrator is not None and self.manager.fleet.history:
                        self._calibrator.finish(self.manager.fleet.record.plan)
                    return ended
                finally:
                    if left := self.launcher.stop_all(_STOP_GRACE_S):
                        self._observe(Notice(text=left, warning=True))
        finally:
            self.server.stop()
            self._journal.close()
            self._ownership.release()

    def spawn(self, count: int = 1) -> None:
        """Ask for more workers."""
        self.manager.post(SpawnRequested(count))

    def stop(self, reason: str, exit_code: int) -> None:
        """End the run soon."""
        self.manager.post(StopRequested(reason, exit_code))

    def worker_of(self, rank: int) -> str:
        """Name of a rank's worker in the newest generation."""
        return self.manager.fleet.members[rank]

    def kill(self, worker: str) -> None:
        """SIGKILL a worker, as a preemption would; the manager finds out by itself."""
        self.launcher.kill(worker)

    def _post(self, event: Event) -> None:
        self.manager.post(event)

    def _on_signal(self, number: int) -> None:
        """Ctrl-C in training ends the run after the current step; at other times, or a second time, at once."""
        if number == signal.SIGINT and not self._is_interrupted and isinstance(self.manager.fleet.phase, Running):
            self._is_interrupted = True
            self.manager.warn(INTERRUPTED)
            self.manager.post(FinishRequested("Ctrl-C was pressed"))
        else:
            self.stop(f"stopped by {signal.Signals(number).name}", 128 + number)

    def _observe(self, event: RunEvent) -> None:
        self._picture.take(event)
        self._on_event(event)


class _Hands:
    """The manager's hands on this machine."""

    def __init__(self, launcher: Launcher, server: WorkerServer) -> None:
        self.spawn, self.kill, self.set_main = launcher.spawn, launcher.kill, launcher.set_main
        self._server = server

    def send(self, name: str, message: ToWorker) -> None:
        """Tell a worker."""
        self._server.send(name, message)

    def release(self, node: str) -> None:
        """Its workers end by themselves; this machine stays."""

    def heard_s(self) -> float | None:
        """When workers could be heard."""
        return self._server.ran_s


def to_stdout(line: bytes) -> None:
    """Pass on a line; a reader that is gone (``| head``), or a full disk, must not stop the worker that writes it.

    Nor must one that does not read, which is up to whoever set standard output: see ``process.output_pump``.
    """
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except (OSError, ValueError):  # ValueError: closed
        return
