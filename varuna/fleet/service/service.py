"""One elastic run, from its first process to its exit code, wherever its workers live.

Parts are built in this order, and each knows only those before it; then the port is opened and the loop runs::

    run folder ─> mailbox ─> back end: port, workers ─> manager's loop ─> operator API
"""

import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TextIO, TypeVar

from starlette.routing import BaseRoute

from varuna.core.errors import UsageError
from varuna.core.version import __version__
from varuna.fleet.manager.answering import Planner
from varuna.fleet.manager.budget_keeper import BudgetKeeper
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator
from varuna.fleet.manager.loop import Executor, Manager, Observer
from varuna.fleet.manager.mailbox import Leave, Mailbox
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.manager.outlook import outlook
from varuna.fleet.manager.prometheus import scraper_token
from varuna.fleet.manager.resume import known_checkpoint
from varuna.fleet.manager.step_desk import StepRecorder
from varuna.fleet.net.ca import make_private, write_private
from varuna.fleet.net.protocol import wire_digest
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.page.costs import check_budget, spent
from varuna.fleet.page.live_feed import LiveFeed
from varuna.fleet.page.logins import Logins
from varuna.fleet.page.status import describe, glance
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.connection_file import Access, publish_access, read_access, remember
from varuna.fleet.run_folder.journal import Journal, Past
from varuna.fleet.state.account import Account
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import CheckpointCompleted, FinishRequested, StopRequested
from varuna.fleet.state.phases import Ended, Running
from varuna.fleet.state.run_events import Budgeted, CheckpointCommitted, Notice, Priced, RunEvent
from varuna.process.file_lock import own
from varuna.process.signals import INTERRUPTED, handled


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Settings of a manager: where and how it runs.

    Args:
        run_dir: journal, keys, logs. If workers outlive their manager: give the same folder again, and the run goes on.
        host: address to listen on.
        port: 0 picks a free one.
        json_log: file that gets a line per committed step.
        new: start afresh instead of resuming from checkpoints.
        overwrite: with ``new``: move existing checkpoints aside.
        checkpoints: the job may save checkpoints here or below, and nowhere else; empty: where it wants.
        price: of workers; None: what the run folder says, if it goes on.
        budget: of the run, with all that it used up in this folder since it was begun with ``new``; None: what the run
            folder says, if it goes on.
    """

    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    json_log: Path | None = None
    new: bool = False
    overwrite: bool = False
    checkpoints: str = ""
    price: Priced | None = None
    budget: Budgeted | None = None


@dataclass(frozen=True)
class Parts:
    """Parts of a service that exist before its back end, which may use them.

    Args:
        run: what is managed, over all lives of its manager.
        is_new: the run folder had no journal.
        mailbox: takes what happens.
        audit: hears who tried what.
        write: gets the main worker's standard output.
    """

    run: str
    is_new: bool
    mailbox: Mailbox
    audit: Audit
    write: Callable[[bytes], None]


class BackEnd(Executor, Protocol):
    """The part of a service that has the run's workers and reaches them; made by a ``Launch``."""

    @property
    def access_host(self) -> str:
        """Address under which tools of this machine reach the manager."""
        ...

    @property
    def port(self) -> int:
        """That workers and people connect to."""
        ...

    @property
    def certificate_pem(self) -> str | None:
        """Certificate of the authority that vouches for the port; None for plain HTTP, on loopback."""
        ...

    def operator_api(self, plain: OperatorApi) -> OperatorApi:
        """``plain`` with what else an operator can do here."""
        ...

    def status(self) -> dict[str, object]:
        """Return what ``GET /status`` says besides the fleet."""
        ...

    def introduction(self, logins: Logins) -> list[Notice]:
        """Return what the user should know at once."""
        ...

    def start(self, routes: Sequence[BaseRoute]) -> None:
        """Open the port, for workers and for these routes.

        Raises:
            FleetError: the server's event loop did not start in time.
        """
        ...

    def leave(self, ended: Ended | None) -> str:
        """Let go of a run that has ended, or continues without this manager (None); return a complaint, or nothing."""
        ...

    def close(self) -> None:
        """Give back the port and files."""
        ...


B_co = TypeVar("B_co", bound=BackEnd, covariant=True)
B = TypeVar("B", bound=BackEnd)


class Launch(Protocol[B_co]):
    """A way to start workers: a value from which a service makes its back end."""

    @property
    def outlives(self) -> bool:
        """Whether workers train on without their manager, and the next one takes them over."""
        ...

    @property
    def logs(self) -> str:
        """Folder of workers' logs in the run folder."""
        ...

    def open(self, place: ServiceConfig, parts: Parts) -> B_co:
        """Build the back end; nobody is let in yet.

        Raises:
            FleetError: the port is taken, or the folder is of no use.
        """
        ...


class ManagerService(Generic[B]):
    """One run; ``manage`` may be called once, by a thread that outlives the run's workers, such as the main one.

    Args:
        place: where it lives.
        launch: where its workers do.
        config: how many, and how patient to be with them.
        planner: plan for a number of workers.
        on_event: sees every event, on the thread of ``manage``.
        on_past: sees the events of managers before this one, at once.
        write: gets the main worker's standard output, line by line.
        calibrator: hears what steps take.

    Raises:
        FleetError: the port is taken, or the folder is of no use.
        UsageError: the log or the folder cannot be written.
    """

    def __init__(
        self,
        place: ServiceConfig,
        launch: Launch[B],
        *,
        config: FleetConfig,
        planner: Planner,
        on_event: Observer = lambda event: None,
        on_past: Observer = lambda event: None,
        write: Callable[[bytes], None] | None = None,
        calibrator: Calibrator | None = None,
    ) -> None:
        self._on_event, self._calibrator, self._outlives = on_event, calibrator, launch.outlives
        self._chronicle, self._is_interrupted = Chronicle(), False
        self.mailbox, self._run_dir = Mailbox(), place.run_dir
        with ExitStack() as undo:
            logs = place.run_dir / launch.logs
            try:
                make_private(place.run_dir, logs)
                ownership = own(place.run_dir, "manager", remedy="Stop that one, or pass another --run-dir.")
                undo.callback(ownership.release)
                journal = Journal(place.run_dir, place.json_log)
            except OSError as error:
                raise UsageError(f"cannot write {error.filename}: {error.strerror}. Pass another place.") from error
            undo.callback(journal.close)
            if launch.outlives:
                _refuse_another_version(place.run_dir, journal.written_by())
            is_new, past = journal.is_new, journal.read() if launch.outlives else None
            run = past.run if past is not None else secrets.token_hex(8)
            before = Account() if is_new or place.new else journal.account()
            self._chronicle.carry(before)
            if past is not None:
                self._recall(past, on_past)
            self._take_up_money(place)
            if past is None:
                journal.begin_run(run, before)
            self._budget = BudgetKeeper(self._chronicle, before.saving_s)
            audit = Audit(self.mailbox.post, warn=self.mailbox.warn)
            self.workers = launch.open(place, Parts(run, is_new, self.mailbox, audit, write or to_stdout))
            """The back end."""
            undo.callback(self.workers.close)
            fresh = place.new and past is None  # a run that goes on keeps its checkpoints
            self._keeper = CheckpointCoordinator(
                new=fresh,
                overwrite=fresh and place.overwrite,
                warn=self.mailbox.warn,
                allowed=place.checkpoints,
                committed=lambda step: self.mailbox.post(CheckpointCommitted(step=step)),
                completed=lambda step: self.mailbox.post(CheckpointCompleted(step)),
                known=None if past is None else known_checkpoint(past),
            )
            self._desk = StepRecorder(
                place.run_dir,
                self.workers.send,
                steps=lambda: self._steps,
                fail=self.mailbox.fail,
                told=self.mailbox.post,
            )
            undo.callback(self._desk.close)
            for event in past.events if past is not None else ():
                self._desk.add_event(event, is_past=True)
            self.manager = Manager(
                config,
                planner,
                mailbox=self.mailbox,
                hands=self.workers,
                journal=journal,
                keeper=self._keeper,
                observer=self._observe,
                past=past,
                calibrator=calibrator,
                on_shown=self._desk.add_shown,
                budget=self._budget,
            )
            known = read_access(place.run_dir) if launch.outlives else None
            token = known.token if known is not None else secrets.token_urlsafe(24)
            self._feed = LiveFeed(self._chronicle, self._brief)
            plain = OperatorApi(
                status=self.status,
                logs=logs,
                ask=self.mailbox.post_request,
                audit=audit,
                operator_token=token,
                feed=self._feed,
                plans=self._plans,
                desk=self._desk,
                run_dir=place.run_dir,
            )
            self._api = self.workers.operator_api(plain)
            undo.callback(self._feed.close)
            access = Access(
                host=self.workers.access_host,
                port=self.port,
                certificate_pem=self.workers.certificate_pem,
                token=token,
            )
            put_back = remember(place.run_dir)
            undo.callback(lambda: put_back() if self._keeper.is_refused else None)
            publish_access(place.run_dir, access)
            write_private(place.run_dir / "metrics-token", scraper_token(token).encode())
            for notice in self.workers.introduction(self._api.logins):
                self._observe(notice)
            if ownership.warning:
                self._observe(Notice(text=ownership.warning, warning=True))
            self._closing = undo.pop_all()

    def _recall(self, past: Past, on_past: Observer) -> None:
        """Take up what a manager before this one has seen."""
        for event in past.events:
            on_past(event)
        self._chronicle.read(self._run_dir)

    def _take_up_money(self, place: ServiceConfig) -> None:
        """Note price and budget where they are new.

        Raises:
            UsageError: the budget means nothing, or is used up.
        """
        known = self._chronicle
        price, budget = place.price or known.price, place.budget or known.budget
        if budget is not None:
            check_budget(budget, price, known.used(time.time(), price), place.run_dir)
        if place.price is not None and place.price != known.price:
            self.mailbox.post(place.price)
        if place.budget is not None and place.budget != known.budget:
            self.mailbox.post(place.budget)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.workers.port

    @property
    def checkpoint(self) -> str | None:
        """Place of the newest complete checkpoint, if there is one."""
        return self._keeper.standing

    def open(self) -> None:
        """Let workers and people in from now on."""
        self.workers.start(self._api.routes())

    def manage(self) -> Ended | None:
        """Manage to the end; None if the run goes on without this manager."""
        with self._closing:
            self.open()
            with handled(self._on_signal):
                ended = None
                try:
                    ended = self.manager.run()
                finally:
                    if left := self.workers.leave(ended):
                        self._observe(Notice(text=left, warning=True))
            if ended is None:
                return None
            if self._is_interrupted and not self._outlives and ended.exit_code == 0:
                ended = Ended(128 + signal.SIGINT, f"stopped by SIGINT, {ended.text}")  # as shells expect of a command
            if self._calibrator is not None and self.manager.fleet.history:
                self._calibrator.finish_run(self.manager.fleet.record.plan)
            return ended

    def stop(self, reason: str, exit_code: int) -> None:
        """End the run soon; any thread may ask for it."""
        self.mailbox.post(StopRequested(reason, exit_code))

    def status(self) -> dict[str, object]:
        """The answer to ``GET /status``; any thread may ask."""
        newest = self._chronicle.newest(self._steps or 0, time.time())
        described = describe(self.manager.fleet, time.monotonic())
        return {**described, **self.workers.status(), **self._saving(), **newest, "disk_free_bytes": self._free_bytes()}

    def glance(self) -> dict[str, object]:
        """The same without generations before the newest; any thread may ask."""
        newest = self._chronicle.newest(self._steps or 0, time.time())
        return {**glance(self.manager.fleet, time.monotonic()), **self._saving(), **newest}

    def _brief(self) -> dict[str, object]:
        reckoned = self._chronicle.reckoned(self._steps or 0, time.time())
        now = glance(self.manager.fleet, time.monotonic())
        return {**now, **self.workers.status(), **self._saving(), **reckoned}

    def _free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._run_dir).free
        except OSError:
            return None

    def _saving(self) -> dict[str, object]:
        gathered = self._keeper.gathered
        return {"saving": None if gathered is None else gathered._asdict()}

    @property
    def run_dir(self) -> Path:
        """Its folder."""
        return self._run_dir

    @property
    def budget(self) -> Budgeted | None:
        """Limits on what the run may use up; None if nobody has said."""
        return self._chronicle.budget

    @property
    def is_cut_short(self) -> bool:
        """Whether somebody, or the budget, wanted the run to end before its last step."""
        fleet = self.manager.fleet
        return fleet.requests.finish is not None and (fleet.job is None or fleet.recorded.step + 1 < fleet.job.steps)

    @property
    def spent(self) -> str:
        """Cost of the run, in words; empty where nobody gave a price."""
        return spent(self._chronicle.cost(time.time()))

    def _plans(self) -> dict[str, object]:
        price = self._chronicle.price
        return outlook(self._calibrator, self.manager.fleet, None if price is None else price.per_hour)

    @property
    def _steps(self) -> int | None:
        job = self.manager.fleet.job
        return None if job is None else job.steps

    def _on_signal(self, number: int) -> None:
        """Ctrl-C is for the run: it ends after the current step, and at once if it comes again, or if none is running.

        SIGTERM is for this process: without their manager, workers go on, or end too.
        """
        is_first, self._is_interrupted = not self._is_interrupted, self._is_interrupted or number == signal.SIGINT
        if number == signal.SIGTERM and self._outlives:
            self.mailbox.post(Leave())
        elif number == signal.SIGINT and is_first and (self._outlives or isinstance(self.manager.fleet.phase, Running)):
            self.mailbox.warn(INTERRUPTED)
            self.mailbox.post(FinishRequested("Ctrl-C was pressed"))
        else:
            self.stop(f"stopped by {signal.Signals(number).name}", 128 + number)

    def _observe(self, event: RunEvent) -> None:
        self._chronicle.add_event(event, time.time())
        self._budget.add_event(event, time.monotonic())
        self._desk.add_event(event)
        self._on_event(event)


def to_stdout(line: bytes) -> None:
    """Pass on a line to standard output."""
    pass_on(line, sys.stdout)


def pass_on(line: bytes, stream: TextIO) -> None:
    """Pass on a line; a reader that is gone (``| head``), or a full disk, must not stop the worker that writes it.

    Nor must one that does not read, which is up to whoever set the stream: see ``process.output_pump``.
    """
    try:
        stream.buffer.write(line)
        stream.buffer.flush()
    except (OSError, ValueError):  # ValueError: closed
        return


def _refuse_another_version(run_dir: Path, written_by: tuple[str, str] | None) -> None:
    """See that this manager and the machines of a run that goes on understand each other.

    Raises:
        UsageError: they do not.
    """
    if written_by is None or written_by == (__version__, wire_digest()):
        return
    version, _ = written_by
    this = __version__ if version != __version__ else f"another source of {__version__}"
    raise UsageError(
        f"the run in {run_dir} goes on with Varuna {version}, and this is {this}: its machines and this manager would "
        "not understand each other. Start the manager with the Varuna that the run began with. To upgrade, end the "
        "run there with `varuna stop`, install the new version on all machines, and start the same commands again: "
        "the run goes on from the checkpoint that stop has saved."
    )


def page_address(scheme: str, host: str, port: int, logins: Logins) -> str:
    """The address of the page, on a terminal with a code that works once: what a build server keeps opens nothing."""
    page = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
    if sys.stderr.isatty():
        return f"{page}#login={logins.invite()} (works once; `varuna open` opens it again)"
    return f"{page} (`varuna open` prints a link)"
