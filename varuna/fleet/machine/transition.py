"""One event's passage through the state machine."""

from dataclasses import replace
from typing import Any

from varuna.core.messages import Finish, ToWorker
from varuna.fleet.state.causes import EndCause, Ending
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.outputs import Ask, Instruction, Kill, Publish, Send
from varuna.fleet.state.phases import Ended, Finishing, Idle, Running, Stopping
from varuna.fleet.state.questions import Answer, Question, UnansweredError, Unusable
from varuna.fleet.state.run_events import Notice, RunEnded, RunEvent, WorkerLeft, WorkerLost
from varuna.fleet.state.worker import Worker, WorkerStatus, changed


class Transition:
    """The fleet as it is so far, and what the shell must do; lives for one call of ``machine.advance``."""

    def __init__(self, fleet: Fleet, now_s: float, *, is_tick: bool = False) -> None:
        self.fleet = fleet
        self.is_tick = is_tick
        self.touched: set[str] = set()
        self.now_s = now_s
        self.instructions: list[Instruction] = []

    def update(self, **changes: Any) -> None:
        """Replace fields of the fleet."""
        self.fleet = changed(self.fleet, **changes)

    def update_worker(self, name: str, **changes: Any) -> None:
        """Replace fields of one worker."""
        workers = self.fleet.workers
        self.update(workers=workers.with_worker(changed(workers[name], **changes)))

    def want_workers(self, more: int) -> None:
        """Let so many more workers exist; with a negative number, fewer."""
        self.update(starts=self.fleet.starts.with_more(more))

    def forget_worker(self, name: str) -> Worker:
        """Remove a worker: whatever it says from now on is ignored."""
        worker = self.fleet.workers[name]
        self.update(workers=self.fleet.workers.without(name))
        if worker.node in self.fleet.contacts.hidden and not self.fleet.workers.on(worker.node):
            self.forget_node(worker.node)
        return worker

    def forget_node(self, node: str) -> None:
        """Forget a machine out of sight that has no workers any more."""
        self.update(contacts=self.fleet.contacts.without(node))

    def watch_worker(self, name: str) -> None:
        """Look at a worker now and at each tick, until there is nothing unusual about it."""
        self.touched.add(name)
        contacts = self.fleet.contacts
        if name not in contacts.watched:
            self.update(contacts=contacts.watching(contacts.watched | {name}))

    def look_at_all(self) -> None:
        """Look at all workers now, since an event has shortened their time."""
        self.update(contacts=self.fleet.contacts.expiring(float("-inf")))

    def expire_by(self, due_s: float) -> None:
        """Look at all workers at ``due_s``, or earlier."""
        if due_s < self.fleet.contacts.expiring_s:
            self.update(contacts=self.fleet.contacts.expiring(due_s))

    def hasten(self) -> None:
        """Tell members to stop at once, since one of them cannot stop by itself any more."""
        phase = self.fleet.phase
        if isinstance(phase, Stopping) and phase.hold_at_s is not None and phase.hold_at_s > self.now_s:
            self.update(phase=replace(phase, hold_at_s=self.now_s))

    def answer_to(self, question: Question) -> Answer:
        """The answer to a question; if there is none yet, ask once.

        Raises:
            UnansweredError: it is not known yet.
        """
        fleet = self.fleet
        if question not in fleet.questions.answers:
            if question not in fleet.questions.open:
                assert fleet.job is not None
                asked = fleet.questions.with_question(question, self.now_s)
                self.update(questions=asked)
                running = fleet.record.plan if fleet.history else None
                self.instructions.append(Ask(question, asked.number, fleet.job, running))
            raise UnansweredError
        return fleet.questions.answers[question]

    def note_answer(self, question: Question, number: int, answer: Answer) -> None:
        """Take an answer; it is dropped if its question is not open any more."""
        asked = self.fleet.questions.open.get(question)
        if asked is None or asked.number != number:
            return
        if isinstance(answer, Unusable):
            self.end_run(answer.exit_code, answer.text)
            return
        self.update(questions=self.fleet.questions.with_answer(question, answer))

    def ask_anew(self) -> None:
        """Forget answers that may not hold any more."""
        self.update(questions=self.fleet.questions.anew())

    def send(self, worker: str, message: ToWorker) -> None:
        """Tell a worker."""
        if isinstance(message, Finish) and not message.training:
            message = message.model_copy(update={"training": self.fleet.training})
        self.instructions.append(Send(worker, message))

    def publish(self, event: RunEvent) -> None:
        """Log and show."""
        self.instructions.append(Publish(event))

    def notice(self, text: str, *, warning: bool = False, departs: bool = False) -> None:
        """Log and show a sentence."""
        self.publish(Notice(text=text, warning=warning, departs=departs))

    def lose_worker(self, name: str, what: str, *, kill: bool = False, rests: bool = False) -> None:
        """Remove a worker that is gone, or is made to go; ``what`` continues the sentence "worker w3 ..."."""
        cause = f"worker {name} {what}"
        if kill:
            self.instructions.append(Kill(name, rests))
        matters = self._matters(name)
        was_in = self.fleet.workers[name].standing in (WorkerStatus.JOINED, WorkerStatus.UNREACHABLE)
        worker = self.forget_worker(name)
        fleet = self.fleet
        self.publish(WorkerLost(worker=name, rank=fleet.rank_of(name), cause=cause))
        if matters:
            self.note_cause(Ending.LOST, cause)
            self.update(generations=self.fleet.generations.with_progress())
        if fleet.history and was_in:
            self.note_change()
            self._note_loss(noticed=worker.node in fleet.machines.departing)
        if fleet.is_member(name):
            self.hasten()
        if not fleet.config.replace:
            self.want_workers(-1)
        elif worker.replacement and name not in fleet.resting:  # whose GPU waits longer each time
            starts = fleet.starts.failed(self.now_s, before_joining=worker.standing is WorkerStatus.STARTING)
            self.update(starts=starts)
            if starts.failures >= fleet.config.max_start_failures:
                self.end_run(
                    1,
                    f"{starts.failures} replacements in a row died before a step was committed. The last one: {cause}. "
                    "Look at its log; if it ran out of memory, use fewer workers per machine.",
                )

    def do_without(self, name: str, reason: str) -> None:
        """Forget a worker that never had a seat; another one in its place would fail in the same way."""
        self.notice(reason, warning=True)
        self.forget_worker(name)
        self.want_workers(-1)

    def part_with(self, name: str) -> None:
        """Remove a worker that has ended as it should; at the run's end nobody needs to hear of each."""
        departure = self.fleet.machines.departing.get(self.fleet.workers[name].node)
        if departure is not None and not departure.is_drain and self.fleet.history:
            self._note_loss(noticed=True)
        self.forget_worker(name)
        if not isinstance(self.fleet.phase, Finishing | Ended):
            self.publish(WorkerLeft(worker=name))

    def note_cause(self, ending: Ending, text: str) -> None:
        """Note why the newest generation ends, or has ended."""
        self.update(generations=self.fleet.generations.with_cause(EndCause(ending, text)))

    def note_change(self) -> None:
        """Note that workers came or went, from which the run learns how often that happens."""
        experience = self.fleet.experience.changed(self.now_s, self.fleet.config.join_grace_s)
        self.update(experience=experience)

    def _note_loss(self, *, noticed: bool) -> None:
        burst_s = self.fleet.config.join_grace_s
        self.update(loss_rate=self.fleet.loss_rate.lost(self.now_s, burst_s=burst_s, noticed=noticed))

    def _matters(self, name: str) -> bool:
        """Whether the loss of a worker ends (or ended) a generation."""
        fleet = self.fleet
        match fleet.phase:
            case Running():
                # Until all have their state, a spare may be the source of somebody's.
                return fleet.record.has_seat(name) or (fleet.is_member(name) and not fleet.is_settled)
            case Idle() | Stopping():
                return fleet.is_member(name)
            case _:
                return False

    def end_run(self, exit_code: int, text: str, *, worker: str | None = None) -> None:
        """End the run, because of ``worker`` if one is to blame, and tell everybody who still listens."""
        if isinstance(self.fleet.phase, Ended):
            return
        failure = text.partition("\n")[0] if exit_code else None
        for name in self.fleet.joined:
            self.send(name, Finish(failure=failure))
        self.publish(RunEnded(exit_code=exit_code, text=text, worker=worker))
        self.update(phase=Ended(exit_code, text))
