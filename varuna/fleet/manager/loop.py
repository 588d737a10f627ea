"""Gives the state machine its events, and does what it says, on one thread.

workers, agents, people, clouds ─> mailbox ─┐
the clock ─────────────────────────> Tick ──┴─> _handle: advance(fleet, event) ─> fleet, instructions
                                                                                     │ in their order
threads for plans and for the store <── Ask, Collect ── Publish (disk first), Send, Spawn, Kill, Release
    └─ AnswerReceived ─> mailbox
"""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from varuna.core.messages import (
    Assign,
    Beat,
    Hello,
    Offered,
    ProfilePart,
    Recorded,
    Shown,
    Sought,
    StepShown,
    ToWorker,
    WorkOffered,
    WorkSought,
)
from varuna.core.plan import Plan
from varuna.fleet.machine.advance import advance
from varuna.fleet.manager.answering import Planner, checkpoint_answer, plan_answer
from varuna.fleet.manager.budget_keeper import BudgetKeeper
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator
from varuna.fleet.manager.mailbox import Broken, Leave, Mailbox, Posted, Pulses, Request
from varuna.fleet.manager.reconcile import Reconciliation, reconcile
from varuna.fleet.manager.rendezvous import Meeting
from varuna.fleet.manager.resume import lost_workers, resume
from varuna.fleet.manager.shared_work import SharedWork
from varuna.fleet.manager.validation import objection
from varuna.fleet.net.protocol import wire_digest
from varuna.fleet.net.watchdog import STOOD_STILL_S
from varuna.fleet.run_folder.journal import Journal, Past
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    AnswerReceived,
    Event,
    Heard,
    MessageReceived,
    Tick,
    WorkerDistrusted,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Ask, Collect, Complain, Instruction, Kill, Publish, Release, Send, Spawn
from varuna.fleet.state.phases import Ended
from varuna.fleet.state.questions import Answer, WhichCheckpoint
from varuna.fleet.state.run_events import (
    Audited,
    Budgeted,
    CheckpointCommitted,
    GenerationStarted,
    GenerationTimed,
    Notice,
    Priced,
    RunEnded,
    RunEvent,
    StepRecorded,
    TrainingEnded,
    WaitsSplit,
    WorkerLost,
)
from varuna.process.background_work import BackgroundWork

_TICK_S = 0.2
_ACCOUNTS_S = 10.0
"""A manager that is killed has not counted so much, at most."""
_CLOSE_S = 150.0  # for the last commits, and for the lease

Observer = Callable[[RunEvent], None]


class Executor(Protocol):
    """The manager's access to the world of processes and connections."""

    def spawn(self, avoided: Collection[str]) -> str:
        """Start a worker, on a GPU that none of these workers had; returns its name."""
        ...

    def kill(self, name: str, *, rests: bool = False) -> None:
        """End a worker for certain; ``rests``: no other one follows on its machine for a while."""
        ...

    def set_main(self, name: str) -> None:
        """Show the output of this worker."""
        ...

    def send(self, name: str, message: ToWorker) -> None:
        """Send a message to a worker."""
        ...

    def release(self, node: str, *, drained: bool) -> None:
        """Give back a machine that the run has left; one that was drained may not come back."""
        ...

    def heard_s(self) -> float | None:
        """The newest moment at which workers could be heard (``time.monotonic``); None if that is not known."""
        ...


class Manager:
    """Owns the fleet: takes what comes into its mailbox, on the thread that calls ``run``."""

    def __init__(
        self,
        config: FleetConfig,
        planner: Planner,
        *,
        mailbox: Mailbox,
        hands: Executor,
        journal: Journal,
        keeper: CheckpointCoordinator,
        observer: Observer,
        past: Past | None = None,
        calibrator: Calibrator | None = None,
        on_shown: Callable[[str, Shown], None] = lambda worker, shown: None,
        budget: BudgetKeeper | None = None,
        sync_s: float = 1.0,
        hung_s: float = 2.0,
    ) -> None:
        """Prepare; nothing happens before ``run``.

        Args:
            config: how many workers, and how patient to be with them.
            planner: makes plans.
            mailbox: where everything comes in.
            hands: starts workers, ends them, and speaks to them.
            journal: keeps what must not be forgotten.
            keeper: commits and finds checkpoints.
            observer: hears each event once it is in the journal.
            past: of the run that a manager before this one left.
            calibrator: corrects what plans are made from.
            on_shown: hears what workers tell because somebody wanted to see it.
            budget: says at each tick what the run's budget demands.
            sync_s: votes are forgotten by workers once the disk has them, which it is asked for this often.
            hung_s: how long the end waits for a store that has not answered at all.
        """
        self._calibrator, self._sync_s, self._hung_s, self._on_shown = calibrator, sync_s, hung_s, on_shown
        self._budget, self._accounted_s = budget, float("-inf")
        self._planner, self._hands, self._journal, self._keeper = planner, hands, journal, keeper
        self._store, self._planning = BackgroundWork("store", mailbox.fail), BackgroundWork("planning", mailbox.fail)
        self._secret = ""  # of the newest generation, by which its members recognise each other
        self._observer = observer
        self._meeting = Meeting()
        self._shared_work = SharedWork()
        self._mailbox = mailbox
        self._leaving, self._was_finite = False, True
        self._early: list[str] = []  # calibrations that workers have offered for the script's next training
        self._owed: dict[str, Recorded] = {}  # by worker: what it may forget once the disk has it
        self._synced_s = float("-inf")
        self._lost = lost_workers(past) if past is not None else set()
        now_s = time.monotonic()
        self.fleet = resume(past, config, now_s) if past is not None else Fleet.empty(config, now_s)
        """Replaced as a whole, so any thread may read it."""

    def run(self) -> Ended | None:
        """Manage until the run ends; workers are told, but may still live. None if it goes on without this manager."""
        try:
            ended = self._run()
        finally:
            self._close_store()
            self._planning.close()
            for event in self._mailbox.take_all():  # what the keeper did and warned of at last
                if isinstance(event, Notice | CheckpointCommitted):
                    self._publish(event)
            if self._budget is not None:
                self._journal.keep_account(self._budget.account())
        if ended is None or ended.exit_code:
            return ended
        if (missing := self._keeper.account(self.fleet.recorded.step + 1)) is not None:
            ended = Ended(1, missing)
            self._publish(RunEnded(exit_code=1, text=missing))
        return ended

    def _run(self) -> Ended | None:
        self._take_up()
        next_tick_s = last_tick_s = time.monotonic()
        while not isinstance(self.fleet.phase, Ended):
            if self._leaving:
                return None
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                heard_s = self._hands.heard_s()
                self._handle(Tick(0.0 if heard_s is None else deaf_s(heard_s, last_tick_s, now_s)))
                next_tick_s, last_tick_s = now_s + _TICK_S, now_s
                self._tell_recorded(now_s)
                self._keep_to_budget(now_s)
                continue
            if (event := self._mailbox.take_oldest(next_tick_s - now_s)) is not None:
                self._take(event)
        return self.fleet.phase

    def _keep_to_budget(self, now_s: float) -> None:
        if self._budget is None:
            return
        for event in self._budget.wanted_now(self.fleet, now_s):
            self._take(event)
        if now_s >= self._accounted_s + _ACCOUNTS_S:
            self._accounted_s = now_s
            self._journal.keep_account(self._budget.account())

    def _tell_recorded(self, now_s: float) -> None:
        """Workers may forget a vote once it survives a power cut: the disk is asked for that once a second."""
        if self._owed and now_s >= self._synced_s + self._sync_s:
            self._synced_s = now_s
            if self._journal.sync():
                for name, message in self._owed.items():
                    self._hands.send(name, message)
                self._owed.clear()

    def _take_up(self) -> None:
        """Go on with a run that this manager did not start."""
        if not self.fleet.history:
            return
        job, history = self.fleet.job, self.fleet.history
        assert job is not None
        self._store.do(lambda: self._keeper.resume(job, history))
        self._hands.set_main(self.fleet.members[0])
        self._meeting.begin_generation(self.fleet.generation, self.fleet.members)
        where = f"generation {self.fleet.generation}, step {self.fleet.recorded.step + 1}"
        self._publish(Notice(text=f"the manager is back: {where}"))

    def _take(self, event: Posted) -> None:
        """Take in what was posted, each thing in its way."""
        match event:
            case Request(event=wanted, done=done):
                self._handle(wanted)
                done.set()
            case (
                Audited() | Notice() | GenerationTimed() | WaitsSplit() | Priced() | Budgeted() | CheckpointCommitted()
            ):
                self._publish(event)
            case Broken(error=error):
                raise error
            case Leave():
                self._leaving = True
            case Pulses():
                self._hear(event)
            case Reconciliation():
                events, fenced = reconcile(self.fleet, self._lost, event)
                for name in fenced:
                    self._hands.kill(name)
                for each in events:
                    self._take(each)
            case _:
                self._take_event(event)

    def _take_event(self, event: Event) -> None:
        """Pass an event on, unless it cannot be true, is none of the state machine's business, or was said before."""
        match event:
            case MessageReceived(worker=name, message=Offered() | Sought() as message):
                self._introduce(name, message)
            case MessageReceived(worker=name, message=WorkSought() | WorkOffered() as message):
                self._share(name, message)
            case MessageReceived(worker=name, message=StepShown() | ProfilePart() as message):
                self._on_shown(name, message)
            case MessageReceived(worker=name, message=message) if found := objection(self.fleet, name, message):
                self._distrust(name, found.text)
            case WorkerSpawned(worker=name) if name in self.fleet.workers or name in self._lost:
                pass  # said twice: before and after a manager's restart
            case MessageReceived(message=Hello(measured=calibration, training=training)) if calibration:
                if training > self.fleet.training:
                    self._early.append(calibration)
                elif training == self.fleet.training and (calibrator := self._calibrator) is not None:
                    self._planning.do(lambda: calibrator.add_offered(calibration))  # before the plan is asked for
                self._handle(event)
            case MessageReceived(worker=name, message=Beat() as beat):
                self._handle(event)
                self._learn(name, beat)
            case _:
                self._handle(event)

    def _hear(self, pulses: Pulses) -> None:
        """Take agents' pulses: all that are as before at once, since most of a large crowd's are."""
        same = []
        for _, beats in pulses.beats:
            for name, beat in beats.items():
                if name in self.fleet.workers and self.fleet.workers[name].beat is beat:
                    same.append(name)
                else:
                    self._take(MessageReceived(name, beat))
        self._handle(Heard(tuple(node for node, _ in pulses.beats), tuple(same)))

    def _introduce(self, worker: str, message: Offered | Sought) -> None:
        """Members of the newest generation find each other."""
        try:
            for name, found in self._meeting.answer_worker(worker, message):
                self._hands.send(name, found)
        except ValueError as error:
            self._distrust(worker, str(error))

    def _share(self, worker: str, message: WorkSought | WorkOffered) -> None:
        """One worker does what all need, the others take it over."""
        for name, found in self._shared_work.answer_worker(worker, message, self.fleet.workers, time.monotonic()):
            self._hands.send(name, found)

    def _distrust(self, worker: str, why: str) -> None:
        """It said what cannot be true."""
        self._publish(Audited(action=f"speak as worker {worker}", address=worker, allowed=False, why=why))
        self._handle(WorkerDistrusted(worker, why))

    def _learn(self, worker: str, beat: Beat) -> None:
        """Learn steps' times from a heartbeat, which may change what is planned from now on."""
        if self._calibrator is not None and beat.times is not None:
            calibrator, fleet, now_s = self._calibrator, self.fleet, time.monotonic()

            def learn() -> None:
                told = calibrator.learn_from_beat(fleet, worker, beat, now_s)
                if told and fleet.job is not None:
                    self._mailbox.post_all(calibrator.begin_generation(fleet.job, fleet.record))
                self._mailbox.post_all(told)

            self._planning.do(learn)

    def _find_out(self, ask: Ask) -> None:
        """On the thread whose business it is."""

        def post(answer: Answer) -> None:
            self._mailbox.post(AnswerReceived(ask.question, ask.number, answer))

        question = ask.question
        if isinstance(question, WhichCheckpoint):
            self._store.do(lambda: post(checkpoint_answer(self._keeper.newest, ask.job)))
        else:
            predicted_s = self._calibrator.predicted_s if self._calibrator is not None else _as_planned_s
            self._planning.do(lambda: post(plan_answer(self._planner, predicted_s, question, ask.job, ask.running)))

    def _close_store(self) -> None:
        """Give the directory free; a store that does not answer is not waited for any longer than a run's last save."""
        self._keeper.stop_waiting()
        looks = any(isinstance(question, WhichCheckpoint) for question in self.fleet.questions.open)
        if not self._store.wait_for(self._keeper.close, self._hung_s if looks else _CLOSE_S):
            self._mailbox.warn(
                "the store of the checkpoints does not answer: whether they are complete, the next run will see"
            )
        self._store.close()

    def _handle(self, event: Event) -> None:
        """One event, and those that follow from it at once: a worker must be known before it can speak."""
        events: deque[Event] = deque([event])
        while events:
            self.fleet, instructions = advance(self.fleet, events.popleft(), time.monotonic())
            for instruction in instructions:
                events.extend(self._execute(instruction))

    def _execute(self, instruction: Instruction) -> list[Event]:
        match instruction:
            case Send(worker=name, message=Recorded() as message):
                self._owed[name] = message
            case Send(worker=name, message=message):
                if isinstance(message, Assign):
                    self._owed.pop(name, None)  # of another timeline, it may be
                    assignment = message.assignment.model_copy(update={"secret": self._secret})
                    message = Assign(assignment=assignment)
                self._hands.send(name, message)
            case Ask():
                self._find_out(instruction)
            case Kill(worker=name, rests=rests):
                self._hands.kill(name, rests=rests)
            case Spawn(count=count, avoided=avoided):
                # On one machine, each process stands for a VM: it can be drained, or be given notice, by itself.
                return [WorkerSpawned(name, node=name) for name in (self._hands.spawn(avoided) for _ in range(count))]
            case Collect(shard=shard):
                self._store.do(lambda: self._keeper.collect(shard))
            case Complain(worker=worker, reason=reason):
                self._store.do(lambda: self._keeper.tell_missing_shard(worker, reason))
            case Publish(event=event):
                self._publish(event)
            case Release(node=node, drained=drained):
                self._hands.release(node, drained=drained)
        return []

    def _publish(self, event: RunEvent) -> None:
        """Disk first: nobody hears of a verdict or a generation that a crash could forget."""
        if isinstance(event, GenerationStarted):
            self._keeper.stop_waiting()  # it has its state
        if isinstance(event, GenerationStarted) and event.record.generation == event.record.began:
            assert self.fleet.job is not None
            self._journal.keep_job(self.fleet.job, self.fleet.script.version, wire_digest())
        vote = self.fleet.recorded.votes.get(event.step) if isinstance(event, StepRecorded) else None
        self._journal.append(event, vote=vote)
        if isinstance(event, StepRecorded):
            self._look_at(event)
        if isinstance(event, WorkerLost):
            self._lost.add(event.worker)
        if isinstance(event, TrainingEnded):
            self._begin_training(event)
        if isinstance(event, GenerationStarted):
            record = event.record
            self._secret = secrets.token_hex(32)
            self._store.do(lambda: self._keeper.begin_generation(record))
            if (calibrator := self._calibrator) is not None and (job := self.fleet.job) is not None:
                self._planning.do(lambda: self._mailbox.post_all(calibrator.begin_generation(job, record)))
            self._meeting.begin_generation(event.record.generation, event.record.members)
            self._hands.set_main(event.record.members[0])
        self._observer(event)

    def _begin_training(self, before: TrainingEnded) -> None:
        """Finish what is under way of the training before; nothing else of it counts any more."""
        self._was_finite = True
        self._store.do(lambda: self._keeper.begin_training(before.steps))
        if (calibrator := self._calibrator) is not None:
            offered, self._early = self._early, []
            self._planning.do(lambda: calibrator.begin_training(offered))

    def _look_at(self, step: StepRecorded) -> None:
        """A run whose loss is no number goes on, since it may come back; a person should know before checkpoints go."""
        is_finite = math.isfinite(step.loss)
        if self._was_finite and not is_finite:
            self._mailbox.warn(
                f"the loss of step {step.step} is {step.loss}. The run continues, but its parameters may also be "
                "NaN, and new checkpoints will replace the good ones. Check the data and the learning rate."
            )
        self._was_finite = is_finite


def _as_planned_s(plan: Plan) -> float:
    """Without measurements nothing is known better than when the plan was made."""
    return plan.step_s


def deaf_s(heard_s: float, last_tick_s: float, now_s: float) -> float:
    """Return the seconds before now in which nobody could be heard, without what the last tick has counted already.

    Workers' words that have come meanwhile lie unread: who holds the server up must not pass for their silence.
    """
    silence_s = now_s - heard_s
    if silence_s <= STOOD_STILL_S:
        return 0.0
    return silence_s if last_tick_s - heard_s <= STOOD_STILL_S else now_s - last_tick_s
