"""``varuna agent``: one machine's part in a run. It starts workers, keeps them alive, and speaks for them.

Workers talk to the agent over loopback, as they talk to the manager of ``varuna run``; the agent relays. A manager
that is away does not disturb them: what counts is remembered (``worker_record``) and told when it is back.
"""

import queue
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from varuna.core.errors import FleetError, UsageError
from varuna.core.messages import Assign, Beat, Failed, FromWorker, Leaving, Offered, Sought, ToWorker, WorkSought
from varuna.core.node_notices import NodeNotice, Preemptible, PreemptionNotice, RebalanceAdvice, ZoneNotice
from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
from varuna.fleet.agent.join import job_identity
from varuna.fleet.agent.log_forwarder import LogForwarder
from varuna.fleet.agent.manager_client import FromUplink, ManagerAddress, ManagerClient, Refused, Trouble, Welcomed
from varuna.fleet.agent.own_departure import OwnDeparture
from varuna.fleet.agent.port_server import PortServer
from varuna.fleet.agent.slots import Slot, Slots
from varuna.fleet.agent.worker_record import WorkerRecords
from varuna.fleet.net.client import VoidSecretError
from varuna.fleet.net.host_facts import HostWatch
from varuna.fleet.net.protocol import (
    Dismiss,
    DownBody,
    End,
    Exited,
    Output,
    Parted,
    Printed,
    ProcessEnded,
    Said,
    Started,
    Tell,
)
from varuna.fleet.net.requests import first_problem
from varuna.fleet.state.inputs import ConnectionLost, MessageReceived, WorkerExited
from varuna.fleet.workers.launcher import Launcher
from varuna.fleet.workers.worker_server import WorkerServer
from varuna.process.machine_port import Address
from varuna.process.signals import handled

SIGTERM_NOTICE_S = 25.0
"""Time that remains after a SIGTERM: Kubernetes and Slurm kill after 30 s."""
_TICK_S = 0.25
_FIRST_WELCOME_S = 600.0  # a machine may boot before its manager does
_MOST_TROUBLES = 8  # reasons that are told between two connections: an error may say something else each time
_LEAVE_S = 8.0  # for workers that were dismissed; less than a manager waits for its agents
_FLUSH_S = 5.0
_LOGS_KEPT = 64
_FULL_S = 30.0  # until a machine that had no room for a worker is asked again
_ALONE_S = 60.0  # with no worker and no manager
_STUCK_S = 1800.0  # with neither a manager nor a step: a machine that costs money and does nothing


@dataclass(frozen=True)
class _Impatience:
    """A second signal."""

    number: int


@dataclass(frozen=True)
class _Confirmed:
    outputs: list[Output]


_OfMachine = MessageReceived | ConnectionLost | WorkerExited | NodeNotice | _Impatience
AgentInput = _OfMachine | FromUplink | DownBody | _Confirmed
"""Inputs of an agent's own thread, which takes one after the other."""


@dataclass(frozen=True)
class AgentConfig:
    """An agent's settings: the script that it runs, its workers and its addresses."""

    script: Path
    args: tuple[str, ...]
    workers: int
    interface: str = ""
    """Address that the workers' data plane binds to; empty: the one that leads to the manager."""
    environment: dict[str, str] = field(default_factory=dict)
    announced: Address | None = None
    """Address at which machines elsewhere reach ``port``; None: others reach each worker, if at all."""
    port: int | None = None
    """Of this machine, for all of its workers; None: the one that is announced."""


class Agent:
    """One agent; ``run`` may be called once, on a thread that outlives the workers.

    ``happened``, ``notify`` and ``signalled`` are for any thread; ``run`` alternates ``take_next`` and ``tend``.

    Args:
        place: where the manager is.
        home: the agent's folder.
        card: the agent's identity.
        config: what it runs.
        tell: shows a line to whoever watches.
    """

    def __init__(
        self,
        place: ManagerAddress,
        home: AgentFolder,
        card: AgentIdentity,
        config: AgentConfig,
        tell: Callable[[str], None],
    ) -> None:
        self._home, self._card, self._config, self._tell = home, card, config, tell
        self._inputs: queue.SimpleQueue[AgentInput] = queue.SimpleQueue()
        self._slots = Slots(config.workers)
        self._roster = WorkerRecords(kept=4 * config.workers)
        token = secrets.token_urlsafe(24)
        self._port = (
            None
            if config.announced is None
            else PortServer(config.port or config.announced.port, config.announced, tell)
        )
        self._server = WorkerServer(
            port=0, token=token, is_ours=lambda name: self._launcher.has_started(name), on_event=self.happened
        )
        self._local = {"VARUNA_MANAGER": self._server.worker_url, "VARUNA_TOKEN": token}
        if self._port is not None:
            self._local["VARUNA_MACHINE_PORT"] = self._port.path
        self._launcher = Launcher(
            [str(config.script), *config.args],
            environment=config.environment,
            run_dir=home.logs_of(card),
            on_exit=self.happened,
            write=self._print,
        )
        self._forwarder = LogForwarder(home.logs_of(card))
        self._host = HostWatch(home.folder)
        self._uplink = ManagerClient(
            place,
            card.identity,
            job_identity(config.script, config.args),
            None if self._port is None else self._port.relay,
            snapshots=self._roster.snapshots,
            beats=self._roster.beats,
            host=lambda: self._host.newest,
            on_event=self.happened,
            on_body=self.happened,
            on_confirmed=lambda outputs: self.happened(_Confirmed(outputs)),
        )
        self._run, self._interface, self._main = "", config.interface, ""
        self._connected = False
        self._troubles: set[str] = set()  # told since the manager was lost
        self._departure = OwnDeparture()
        self.is_released = False  # whether the run does not need this machine any more
        self._quiet_since_s = time.monotonic()  # since when there is neither a worker nor a manager
        self._progress_s = time.monotonic()  # newest moment at which a step was done, or the manager was there
        self.exit_code: int | None = None
        """None: the agent serves on"""

    def happened(self, event: AgentInput) -> None:
        """Something happened, here or at the manager: ``take_next`` will see to it."""
        self._inputs.put(event)

    def notify(self, notice: NodeNotice) -> None:
        """Take in a notice about this machine; any thread may have it."""
        self.happened(notice)

    def run(self) -> int:
        """Serve the run until it is over, or this machine is; leaves no process running. Returns the exit code.

        Raises:
            FleetError: the manager refuses this agent, or cannot be reached for ten minutes at the start.
        """
        begin_s = time.monotonic()
        self._server.start()
        if self._port is not None:
            self._port.start()
        self._host.start()
        self._uplink.start()
        try:
            with handled(self.signalled):
                while self.exit_code is None:
                    self.take_next()
                    self.tend(time.monotonic())
                    if not self._run and time.monotonic() > begin_s + _FIRST_WELCOME_S:
                        raise FleetError(f"no manager answered at {self._uplink.place} for {_FIRST_WELCOME_S:.0f} s")
        finally:
            if left := self._launcher.stop_all(0.0):
                self._tell(left)
            self._last_words()
            self._host.stop()
            self._uplink.stop(_FLUSH_S if self._connected else 0.0)
            self._server.stop()
            if self._port is not None:
                self._port.stop()
        return self.exit_code

    # -- what happens --------------------------------------------------------------------------------------

    def take_next(self) -> None:
        """Take the next input, if one comes soon; say so and drop it if it makes an invalid message to the manager."""
        try:
            self._take(self._inputs.get(timeout=_TICK_S))
        except queue.Empty:
            pass
        except ValidationError as error:
            self._tell(
                "a message to the manager was dropped because of an internal error (please report it): "
                f"{first_problem(error)}"
            )

    def _take(self, event: AgentInput) -> None:
        match event:
            case MessageReceived(worker=worker, message=message):
                self._hear(worker, message)
            case ConnectionLost(worker=worker):
                if self._roster.has(worker):  # not of the run before
                    self._uplink.send(Parted(worker=worker))
            case WorkerExited():
                self._note_exit(event)
            case PreemptionNotice() | RebalanceAdvice() | Preemptible() | ZoneNotice():
                self._note_notice(event)
            case _Impatience(number=number):
                self.exit_code = 128 + number
            case _:
                self._take_from_manager(event)

    def _take_from_manager(self, event: FromUplink | DownBody | _Confirmed) -> None:
        match event:
            case Welcomed():
                self._meet(event)
            case Trouble(reason=reason, was_welcome=was_welcome):
                self._note_trouble(reason, was_welcome)
            case Refused(reason=reason, is_void=is_void):
                raise VoidSecretError(reason) if is_void else FleetError(reason)
            case Tell(worker=worker, message=message):
                self._pass_on(worker, message)
            case End(worker=worker, rests=rests):
                if rests:
                    self._slots.failed(worker)
                self._launcher.kill(worker)
            case Dismiss():
                self._leave(event)
            case _Confirmed(outputs=outputs):
                self._forwarder.confirmed(outputs)

    def _pass_on(self, worker: str, message: ToWorker) -> None:
        """The manager tells a worker something."""
        self._roster.note_from_manager(worker, message)
        if isinstance(message, Assign):
            self._note_main(worker, message)
        self._server.send(worker, message)

    def _hear(self, worker: str, message: FromWorker) -> None:
        """A worker said something: beats wait for the next pulse, the rest goes at once."""
        is_ours, got_on = self._roster.note_from_worker(worker, message)
        if isinstance(message, Failed) and (message.fault is not None or self._roster.broke_off(worker)):
            self._slots.failed(worker, is_memory=message.fault is not None and message.fault.is_memory)
        if got_on:
            self._progress_s = time.monotonic()
        if isinstance(message, Offered | Sought | WorkSought) and not self._connected:
            return  # it is said again for as long as somebody needs it
        if is_ours and not isinstance(message, Beat):
            self._uplink.send(Said(worker=worker, message=message))

    def _meet(self, event: Welcomed) -> None:
        """Greet the manager after connecting."""
        welcome = event.welcome
        self._connected = True
        self._troubles.clear()
        self._interface = self._interface or event.interface
        if self._run and welcome.run != self._run:
            self._tell("the manager started another run; restarting this machine's workers")
            self._roster.clear()
            self._slots.begin_anew()
            for worker in self._slots.workers:
                self._launcher.kill(worker)
        elif not self._run:
            where = self._config.announced or self._interface
            self._tell(f"joined the run as {self._card.identity.node}; data plane on {where}")
        else:
            self._tell(f"connected to the manager again, at {self._uplink.place}")
        self._run = self._local["VARUNA_CHART"] = welcome.run
        if not welcome.resumed:
            self._forwarder.begin(event.epoch, welcome.kept)
            self._say_departure()

    def _note_trouble(self, reason: str, was_welcome: bool) -> None:
        """The connection broke; it is made again until somebody answers. Until then each reason is said once."""
        if was_welcome:
            self._tell(f"lost the manager at {self._uplink.place} ({reason}); workers continue to train")
        elif reason not in self._troubles and len(self._troubles) < _MOST_TROUBLES:
            self._troubles.add(reason)
            bound = "; workers continue to train" if self._run else f" for {_FIRST_WELCOME_S / 60:.0f} minutes"
            self._tell(f"{reason} Trying again{bound}.")
        self._connected = False

    def _note_exit(self, event: WorkerExited) -> None:
        """Record that a worker's process ended.

        What failed in the midst of training may have been this machine: if the run goes on, another worker follows,
        after a rest.
        """
        if event.code > 0 and self._roster.broke_off(event.worker):
            self._slots.failed(event.worker)
        if not self._slots.ended(event.worker, event.code, time.monotonic()):
            return
        exited = Exited.of(event.code, event.stderr_tail, is_oom=event.is_oom)
        if self._roster.ended(event.worker, exited):
            self._uplink.send(ProcessEnded(worker=event.worker, exited=exited))

    def _note_notice(self, notice: NodeNotice) -> None:
        """Record a preemption notice or an advice, and pass it on if it says more than the ones before."""
        if news := self._departure.note_notice(notice, time.monotonic()):
            self._tell(news)
            self._say_departure()

    def _say_departure(self) -> None:
        for body in self._departure.to_say(time.monotonic()):
            self._uplink.send(body)

    def _note_main(self, worker: str, message: Assign) -> None:
        """Only the main worker's lines are shown, wherever it runs."""
        if message.assignment.rank == 0:
            self._main = worker
        elif self._main == worker:
            self._main = ""
        self._launcher.set_main(self._main)

    def _leave(self, dismissal: Dismiss) -> None:
        """Wait until workers that were released have ended, then exit."""
        self._tell(dismissal.reason)
        for record in self._roster.all():
            if record.hello is None:  # it is still starting, and would wait for a part that never comes
                self._launcher.kill(record.name)
        self._launcher.stop_all(_LEAVE_S)
        self.is_released = True
        if dismissal.drained:
            self._home.forget()
        self.exit_code = dismissal.exit_code

    # -- time passes ---------------------------------------------------------------------------------------

    def tend(self, now_s: float) -> None:
        """Start workers, forward logs, and see whether there is anything left to do."""
        if self.exit_code is not None:
            return
        if self._run and self._connected and not self._departure.is_near:
            for slot in self._slots.due(now_s):
                self._start(slot, now_s)
        if self._connected:
            for output in self._forwarder.next_outputs():
                self._uplink.send(output, epoch=self._forwarder.epoch)
        if self._departure.is_over(now_s):
            self._tell("the notice period is over")
            self.exit_code = 0
        if self._connected:
            self._progress_s = now_s
        elif self._run and now_s > self._progress_s + _STUCK_S:
            self._tell(f"no manager and no step for {_STUCK_S / 60:.0f} minutes; exiting")
            self.exit_code = 1
        if not self._run or not self._slots.all_done:
            self._quiet_since_s = now_s
        elif now_s > self._quiet_since_s + _ALONE_S:
            self._end_alone()

    def _start(self, slot: Slot, now_s: float) -> None:
        number = self._card.next_worker
        card = self._card.model_copy(update={"next_worker": number + 1})
        name = f"{card.identity.node}.{number}"
        more = {**self._local, "VARUNA_INTERFACE": self._interface, "LOCAL_RANK": str(slot.index)}
        try:
            self._home.write(card)  # first: after a restart no number may be used twice
        except UsageError as error:
            self._put_off(slot, now_s, str(error))
            return
        self._card = card
        try:
            self._launcher.spawn(name, more)
        except OSError as error:
            why = f"{error}. Is this machine short of memory, processes or disk space? Look at `ulimit -a` and `df`"
            self._put_off(slot, now_s, why)
            return
        self._roster.add(name)
        self._slots.started(slot, name, now_s)
        self._uplink.send(Started(worker=name))
        self._home.prune(self._card, _LOGS_KEPT + len(self._slots))

    def _put_off(self, slot: Slot, now_s: float, why: str) -> None:
        slot.start_at_s = now_s + _FULL_S
        self._tell(f"cannot start a worker: {why}")

    def _end_alone(self) -> None:
        """End because all workers ended and the manager gave no instruction."""
        records = self._roster.all()
        ended = (record for record in records if record.exited is not None and not isinstance(record.leaving, Leaving))
        codes = [record.exited.code for record in ended if record.exited is not None]
        worst = max((abs(code) for code in codes), default=0)
        text = next((w.exited.stderr_tail for w in reversed(records) if w.exited is not None and w.exited.code), "")
        if worst and text:
            self._tell(text.rstrip())
        self._tell("no workers left and no instructions from the manager; exiting")
        self.exit_code = 1 if worst else 0

    def _last_words(self) -> None:
        """Tell the manager of workers that have exited since the last look, and send it the rest of the logs."""
        while True:
            try:
                event = self._inputs.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, WorkerExited):
                self._note_exit(event)
        if self._connected:
            for output in self._forwarder.next_outputs():
                self._uplink.send(output, epoch=self._forwarder.epoch)

    # -- other threads -------------------------------------------------------------------------------------

    def _print(self, line: bytes) -> None:
        self._uplink.send(Printed(worker=self._main or self._card.identity.node + ".0", data=line[: 2**15]))

    def signalled(self, number: int) -> None:
        """The first one is a notice, even after a cloud's: machines that are shut down get one. A second means now."""
        if self._departure.note_signal():
            self.happened(_Impatience(number))
        else:
            self.happened(PreemptionNotice(in_s=SIGTERM_NOTICE_S, reason=f"received {signal.Signals(number).name}"))
