"""``varuna run``: an elastic run on this machine, from its first process to its exit code."""

import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from varuna.core.errors import UsageError
from varuna.core.messages import ToWorker
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.events import Event, SpawnRequested, StopRequested
from varuna.fleet.journal import Journal
from varuna.fleet.keeper import CheckpointKeeper
from varuna.fleet.launcher import Launcher
from varuna.fleet.manager import Manager, Observer
from varuna.fleet.server import Server
from varuna.fleet.state import Advice, Ended, FleetConfig, Planner
from varuna.fleet.status import LossCurve, describe
from varuna.fleet.store import StoreHost
from varuna.fleet.story import Notice, RunEvent

_STOP_GRACE_S = 2.0
"""Time for dismissed workers to end by themselves."""


class Run:
    """One elastic run of a script; ``start_and_wait`` may be called once.

    ``kill``, ``spawn``, ``worker_of`` and ``stop`` may be called by any thread, ``on_event`` included.

    Args:
        script: the training script.
        args: its arguments.
        config: how many workers, and how patient to be.
        planner: plan for a number of workers.
        run_dir: where logs and ``events.jsonl`` go.
        json_log: file that gets a line per committed step.
        new: start afresh instead of resuming.
        overwrite: with ``new``: move existing checkpoints aside.
        port: of the manager on loopback; 0 picks a free one.
        on_event: sees every event, on the thread of ``start_and_wait``.
        write: gets the main worker's standard output, line by line.
        store: where process groups meet; None starts a store in this process.
        environment: more variables for the workers.

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
        json_log: Path | None = None,
        new: bool = False,
        overwrite: bool = False,
        port: int = 0,
        on_event: Observer = lambda event: None,
        write: Callable[[bytes], None] | None = None,
        store: Callable[[], tuple[str, int]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        if not script.is_file():
            raise UsageError(f"no script at {script}. Name a Python file.")
        token = secrets.token_urlsafe(24)
        self.server = Server(port=port, token=token, on_event=self._post, status=self._status)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(run_dir, json_log)
        except OSError as error:
            self.server.stop()
            raise UsageError(f"cannot write {error.filename}: {error.strerror}. Give another place.") from error
        self._on_event, self._losses = on_event, LossCurve()
        self.launcher = Launcher(
            [str(script), *args],
            environment={**(environment or {}), "VARUNA_MANAGER": self.server.worker_url, "VARUNA_TOKEN": token},
            run_dir=run_dir,
            on_exit=self._post,
            write=write or _to_stdout,
        )
        keeper = CheckpointKeeper(new=new, overwrite=overwrite, warn=lambda text: self.manager.warn(text))
        self.manager = Manager(
            config,
            Advice(plan=planner, checkpoint=keeper.newest, store=store or StoreHost().address),
            hands=_Hands(self.launcher, self.server),
            journal=self._journal,
            keeper=keeper,
            observer=self._observe,
        )
        self._observe(Notice(text=f"logs in {run_dir}, status at {self.server.page_url}"))

    def start_and_wait(self) -> Ended:
        """Start the workers, manage them to the end, and leave no process behind.

        Call it on a thread that outlives the run's workers, such as the main one.
        """
        self.server.start()
        try:
            with _signals(self.stop):
                try:
                    return self.manager.run()
                finally:
                    self.launcher.stop_all(_STOP_GRACE_S)
        finally:
            self.server.stop()
            self._journal.close()

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

    def _status(self) -> dict[str, object]:
        return {**describe(self.manager.fleet), **self._losses.describe()}

    def _observe(self, event: RunEvent) -> None:
        self._losses.take(event)
        self._on_event(event)


def run_job(
    script: Path,
    args: Sequence[str],
    *,
    workers: int,
    memory_bytes: int | None = None,
    stages: int | None = None,
    json_log: Path | None = None,
    run_dir: Path | None = None,
    new: bool = False,
    overwrite: bool = False,
    port: int = 0,
    on_event: Observer = lambda event: None,
) -> int:
    """Train ``script`` on local workers; a failure's text goes to standard error. Returns the exit code.

    Raises:
        VarunaError: the run cannot start.
    """
    from varuna.planner.choose import plan_run

    def plan(job: JobFacts, count: int, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=count, memory_bytes=memory_bytes, stages=stages, micro_batch=micro_batch)

    run = Run(
        script,
        args,
        config=FleetConfig(workers=workers),
        planner=plan,
        run_dir=run_dir or Path(tempfile.mkdtemp(prefix="varuna-run-")),
        json_log=json_log,
        new=new,
        overwrite=overwrite,
        port=port,
        on_event=on_event,
    )
    ended = run.start_and_wait()
    if ended.exit_code:
        print(f"varuna: {ended.text}", file=sys.stderr)
    return ended.exit_code


class _Hands:
    """The manager's hands on this machine."""

    def __init__(self, launcher: Launcher, server: Server) -> None:
        self.spawn, self.kill, self.set_main = launcher.spawn, launcher.kill, launcher.set_main
        self._server = server

    def send(self, name: str, message: ToWorker) -> None:
        """Tell a worker."""
        self._server.send(name, message)


@contextmanager
def _signals(stop: Callable[[str, int], None]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an orderly end; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop(f"stopped by {signal.Signals(number).name}", 128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _to_stdout(line: bytes) -> None:
    """Pass on a line; a reader that is gone (``| head``) must not stop the worker that writes it."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except (BrokenPipeError, ValueError):  # ValueError: closed
        return
