"""``varuna manager``: an elastic run on other machines, from its first agent to its exit code."""

import gc
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette

from varuna.core.errors import UsageError
from varuna.core.messages import MAX_FRAME_BYTES, ToWorker
from varuna.fleet.manager.agent_server import AgentServer
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator
from varuna.fleet.manager.loop import Manager, Observer
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.manager.reconcile import node_of
from varuna.fleet.manager.status import Picture
from varuna.fleet.net.ca import make_private, open_authority
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.net.protocol import End, Tell
from varuna.fleet.net.serving import Serving, raise_open_files
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.connection_file import Access, publish, read_token
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.run_folder.registry import TOKEN_LIFE_S, Registry
from varuna.fleet.run_folder.worker_logs import LogKeeper
from varuna.fleet.state.fleet import Ended, FleetConfig
from varuna.fleet.state.inputs import FinishRequested, StopRequested
from varuna.fleet.state.questions import Planner
from varuna.fleet.state.run_events import Notice, RunEvent
from varuna.fleet.state.stutter import SLOW_RATIO
from varuna.process.file_lock import own
from varuna.process.signals import INTERRUPTED, handled

_FAREWELL_S = 10.0
"""For agents to hear that the run is over, and to send the rest of their logs."""
FUTILE_S = 1800.0
"""Cables between machines have so long to come back: as long as agents without a manager and a step wait."""


_ODD = (
    "{} has the keys of a run but an empty journal: starting a new run. If run.db was copied without its "
    "run.db-wal, stop this manager, copy both, and start it again"
)


@dataclass(frozen=True, kw_only=True)
class ManagerConfig:
    """Where and how a manager runs.

    Args:
        run_dir: journal, certificate authority, logs: give the same folder again, and the run goes on.
        host: address to listen on.
        port: 0 picks a free one.
        advertised: address under which agents reach it; empty: ``host``, or this machine's own if that is 0.0.0.0.
        json_log: file that gets a line per committed step.
        new: start afresh instead of resuming from checkpoints.
        overwrite: with ``new``: move existing checkpoints aside.
        checkpoints: the job may save checkpoints here or below, and nowhere else; empty: where it wants.
    """

    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    advertised: str = ""
    json_log: Path | None = None
    new: bool = False
    overwrite: bool = False
    checkpoints: str = ""


class ClusterManager:
    """One elastic run; ``manage`` may be called once.

    Args:
        place: where it lives.
        config: how patient to be.
        planner: plan for a number of workers.
        on_event: sees every event, on the thread of ``manage``.
        on_past: sees the events of managers before this one, at once.
        write: gets the main worker's standard output.
        calibrator: hears what steps take.

    Raises:
        FleetError: the port is taken, or the folder is of no use.
        UsageError: the log or the folder cannot be written.
    """

    def __init__(
        self,
        place: ManagerConfig,
        *,
        config: FleetConfig,
        planner: Planner,
        on_event: Observer,
        on_past: Observer,
        write: Callable[[bytes], None],
        calibrator: Calibrator | None = None,
    ) -> None:
        raise_open_files()
        try:
            make_private(place.run_dir, place.run_dir / "logs")
            self._ownership = own(place.run_dir, "manager", remedy="Stop that one, or pass another --run-dir.")
            self._journal = Journal(place.run_dir, place.json_log)
        except OSError as error:
            raise UsageError(f"cannot write {error.filename}: {error.strerror}. Pass another place.") from error
        past = self._journal.read()
        is_odd = self._journal.is_new and (place.run_dir / "tls" / "ca.pem").exists()
        run = past.run if past is not None else secrets.token_hex(8)
        if past is None:
            self._journal.begin(run)
        self._registry = Registry(place.run_dir)
        self._authority = open_authority(place.run_dir / "tls")
        self._advertised = place.advertised or _own_address(place.host)
        self._on_event, self._picture, self._is_interrupted = on_event, Picture(), False
        for event in past.events if past is not None else ():
            self._picture.take(event)
            on_past(event)
        audit = Audit(lambda event: self.manager.post(event))
        logs = LogKeeper(place.run_dir / "logs")
        self._door = AgentServer(
            registry=self._registry,
            certificate_pem=self._authority.certificate_pem,
            manager=secrets.token_hex(8),
            run=run,
            post=lambda event: self.manager.post(event),
            logs=logs,
            audit=audit,
            write=write,
        )
        operator_token = read_token(place.run_dir) or secrets.token_urlsafe(24)
        people = OperatorApi(
            status=self.status,
            hosts=lambda: self._door.hosts(),
            logs=place.run_dir / "logs",
            ask=lambda event: self.manager.ask(event),
            audit=audit,
            mint=lambda uses, life_s: str(self.invite(uses=uses, life_s=life_s)),
            void_tokens=self._registry.void_tokens,
            send_away=self.send_away,
            operator_token=operator_token,
        )
        self._serving = Serving(
            Starlette(routes=[*self._door.routes(), *people.routes()]),
            host=place.host,
            port=place.port,
            max_frame_bytes=MAX_FRAME_BYTES,
            tls=self._authority.server_context(),
        )
        self.port = self._serving.port
        fresh = place.new and past is None  # a run that goes on keeps its checkpoints
        keeper = CheckpointCoordinator(
            new=fresh,
            overwrite=fresh and place.overwrite,
            warn=lambda text: self.manager.warn(text),
            allowed=place.checkpoints,
        )
        self.manager = Manager(
            config,
            planner,
            hands=_Hands(self._door, self._serving, self._registry, lambda: self.manager),
            journal=self._journal,
            keeper=keeper,
            observer=self._observe,
            past=past,
            calibrator=calibrator,
        )
        local = "127.0.0.1" if place.host in ("0.0.0.0", "127.0.0.1") else place.host
        publish(
            place.run_dir,
            Access(host=local, port=self.port, certificate_pem=self._authority.certificate_pem, token=operator_token),
        )
        self._observe(Notice(text=f"manager at {self._advertised}:{self.port}, run folder {place.run_dir}"))
        if is_odd:
            self._observe(Notice(text=_ODD.format(place.run_dir), warning=True))
        if self._ownership.warning:
            self._observe(Notice(text=self._ownership.warning, warning=True))

    def invite(self, *, uses: int = 1, life_s: float = TOKEN_LIFE_S) -> JoinString:
        """Create a JOIN string."""
        return JoinString(
            host=self._advertised,
            port=self.port,
            fingerprint=self._authority.fingerprint,
            token=self._registry.mint(uses=uses, life_s=life_s),
        )

    def send_away(self, node: str) -> bool:
        """Void a machine's secret, and drop its workers, now; False if no such machine ever joined."""
        if not self._registry.revoke(node, "sent away"):
            return False
        self._serving.call(self._door.send_away, node, "its machine was removed")
        return True

    def open(self) -> None:
        """Let agents and people in from now on.

        What was imported is kept out of garbage collections: looking through all of it, again and again, stopped the
        beats of a thousand agents for a fifth of a second each time.
        """
        gc.freeze()
        self._serving.start()

    def manage(self) -> Ended | None:
        """Manage to the end, and send all agents home; None if the run goes on without this manager."""
        self.open()
        try:
            with handled(self._on_signal):
                ended = self.manager.run()
            if ended is not None:
                self._say_goodbye(ended)
        finally:
            self._serving.stop()
            self._registry.close()
            self._journal.close()
            self._ownership.release()
        return ended

    def status(self) -> dict[str, object]:
        """The answer to ``GET /status``."""
        return {**self._picture.describe(self.manager.fleet, time.monotonic()), "connected": self._door.connected}

    def _on_signal(self, number: int) -> None:
        """SIGTERM is for this process, Ctrl-C for the run: after the current step, and at once if it comes again."""
        if number == signal.SIGTERM:
            self.manager.leave()
        elif self._is_interrupted:
            self.manager.post(StopRequested("stopped by SIGINT", 130))
        else:
            self._is_interrupted = True
            self.manager.warn(INTERRUPTED)
            self.manager.post(FinishRequested("Ctrl-C was pressed"))

    def _say_goodbye(self, ended: Ended) -> None:
        """Agents leave by themselves once they have sent what they still had."""
        reason = f"the run is over: {ended.text.splitlines()[0] if ended.text else 'done'}"
        self._serving.call(self._door.dismiss, None, reason, ended.exit_code)
        deadline_s = time.monotonic() + _FAREWELL_S
        while self._door.connected and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def _observe(self, event: RunEvent) -> None:
        self._picture.take(event)
        self._on_event(event)


class _Hands:
    """The manager's hands on other machines: their agents."""

    def __init__(self, door: AgentServer, serving: Serving, registry: Registry, manager: Callable[[], Manager]) -> None:
        self._registry = registry
        self._door, self._call, self._manager = door, serving.call, manager
        self._serving = serving

    def spawn(self) -> str:
        """Never asked for: machines come by themselves."""
        raise AssertionError("an elastic run cannot start workers")

    def send(self, name: str, message: ToWorker) -> None:
        """Send a message to a worker."""
        self._call(self._door.send, node_of(name), Tell(worker=name, message=message))

    def kill(self, name: str) -> None:
        """End a worker, as soon as its agent is there."""
        self._call(self._door.send, node_of(name), End(worker=name))

    def set_main(self, name: str) -> None:
        """Show the output of this worker."""
        self._call(self._door.set_main, name)

    def heard_s(self) -> float | None:
        """When agents could be heard."""
        return self._serving.ran_s

    def release(self, node: str) -> None:
        """The run has left a machine; one that was drained may not come back with the same secret."""
        departure = self._manager().fleet.departing.get(node)
        drained = departure is not None and departure.deadline_s == float("inf")
        reason = "drained" if drained else "the run no longer uses this machine"
        if drained:
            self._registry.revoke(node, reason)
        self._call(lambda: self._door.dismiss(node, reason, 0, drained=drained))


def _own_address(host: str) -> str:
    """The address by which this machine reaches others, if it listens on all; no packet is sent."""
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
    return address


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
