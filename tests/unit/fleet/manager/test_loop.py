"""The manager's shell: what it believes and writes down, whoever lies and whatever clocks do."""

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from tests.unit.fleet.support import make_job, make_vote, two_stages
from varuna.core.messages import Assign, Beat, FromWorker, Hello, Recorded, StopReport, ToWorker, Voted
from varuna.core.model import JobFacts
from varuna.fleet.manager.checkpoint_coordinator import CheckpointCoordinator
from varuna.fleet.manager.loop import Manager
from varuna.fleet.manager.mailbox import Mailbox, Pulses
from varuna.fleet.page.status import describe
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import Event, FinishRequested, MessageReceived, StopRequested
from varuna.fleet.state.phases import Idle
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import Asked, Audited, GenerationStarted, Notice, RunEvent, StepRecorded, WorkerLost

JOB = make_job()
PLAN = two_stages(JOB, 4, None)
MEMBERS = ("w0", "w1", "w2", "w3")


class Hands:
    """Knows what it was asked to do."""

    def __init__(self) -> None:
        self.names = iter(MEMBERS)
        self.killed: list[str] = []
        self.sent: list[tuple[str, ToWorker]] = []
        self.generation = -1
        self.on_generation: Callable[[int], None] = lambda generation: None

    def spawn(self, avoided: Collection[str]) -> str:
        return next(self.names)

    def kill(self, name: str, *, rests: bool = False) -> None:
        self.killed.append(name)

    def set_main(self, name: str) -> None:
        pass

    def send(self, name: str, message: ToWorker) -> None:
        self.sent.append((name, message))
        if isinstance(message, Assign) and message.assignment.generation > self.generation:
            self.generation = message.assignment.generation
            self.on_generation(self.generation)

    def release(self, node: str, *, drained: bool) -> None:
        pass

    def heard_s(self) -> float | None:
        return None


class Play:
    """A manager that hears what is said, in order, and is then told to stop.

    What belongs to a generation is said once that was assigned: its plan is made on another thread.
    """

    def __init__(
        self,
        folder: Path,
        keeper: CheckpointCoordinator | None = None,
        config: FleetConfig | None = None,
        sync_s: float = 1.0,
        hung_s: float = 2.0,
    ) -> None:
        self.seen: list[RunEvent] = []
        self.script: list[tuple[int, Event]] = []
        self.hands, self.folder = Hands(), folder
        self.hands.on_generation = self.go_on
        self.journal = Journal(folder, None)
        self.journal.begin_run("r")
        self.mailbox = Mailbox()
        self.manager = Manager(
            config or FleetConfig(workers=4, replace=False),
            two_stages,
            mailbox=self.mailbox,
            hands=self.hands,
            journal=self.journal,
            keeper=keeper or CheckpointCoordinator(new=False, overwrite=False, warn=lambda text: None),
            observer=self.seen.append,
            sync_s=sync_s,
            hung_s=hung_s,
        )
        for name in MEMBERS:
            self.say(name, Hello(worker=name, pid=1, version="1", job=JOB))
        self.say("w0", Voted(vote=make_vote(PLAN, 0, 0)))

    def say(self, worker: str, message: FromWorker) -> None:
        match message:
            case Voted(vote=vote):
                generation = vote.generation
            case StopReport(generation=generation):
                pass
            case _:
                generation = -1
        self.script.append((generation, MessageReceived(worker, message)))
        self.go_on(self.hands.generation)

    def go_on(self, generation: int) -> None:
        """Say what may be said now."""
        while self.script and self.script[0][0] <= generation:
            self.mailbox.post(self.script.pop(0)[1])

    def held(self, worker: str) -> StopReport:
        stage = PLAN.place_of(MEMBERS.index(worker)).stage
        return StopReport(generation=0, next_step=1, sections=tuple(PLAN.first.sections_of(stage)))

    def end(self) -> None:
        self.script.append((self.script[-1][0] if self.script else -1, StopRequested("enough", 0)))
        self.go_on(self.hands.generation)
        assert self.manager.run() is not None


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path)
    yield play
    play.journal.close()


def test_beats_that_come_together_are_heard_one_by_one(play: Play) -> None:
    beats = {"w2": Beat(generation=-1, step=0, activity="waits"), "w3": Beat(generation=9, step=0, activity="lies")}
    play.mailbox.post(Pulses((("a", beats), ("b", {}))))
    play.end()
    assert [(event.worker, "generation 9" in event.cause) for event in play.seen if isinstance(event, WorkerLost)] == [
        ("w3", True)
    ]
    beat = play.manager.fleet.workers["w2"].beat
    assert beat is not None
    assert beat.activity == "waits"


def test_a_worker_that_lies_is_killed_and_written_down_and_the_others_go_on(play: Play) -> None:
    play.say("w3", StopReport(generation=0, next_step=1, sections=(0, 1, 2, 3)))
    play.say("w3", play.held("w3"))  # nobody listens to it any more
    for name in MEMBERS[:3]:
        play.say(name, play.held(name))
    play.say("w0", Voted(vote=make_vote(two_stages(JOB, 3, None), 1, 1)))
    play.end()
    assert play.hands.killed == ["w3"]
    [refused] = [event for event in play.seen if isinstance(event, Audited)]
    assert (refused.action, refused.allowed) == ("speak as worker w3", False)
    assert "sections 0, 1, 2, 3, which it was never given" in refused.why
    assert [event.worker for event in play.seen if isinstance(event, WorkerLost)] == ["w3"]
    records = [event.record for event in play.seen if isinstance(event, GenerationStarted)]
    assert [set(record.members) for record in records] == [set(MEMBERS), set(MEMBERS[:3])]
    assert [event.step for event in play.seen if isinstance(event, StepRecorded)] == [0, 1]
    assert [record.rollback for record in records] == [True, False]  # the beginning, and what the honest ones hold


def test_a_wall_clock_that_jumps_changes_nothing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and deadlines live on the monotonic clock; the journal's order is that of its rows."""
    jumps = itertools.cycle([4e9, 0.0, 1.7e9])
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: next(jumps))
        for step in range(1, 9):
            play.say("w0", Voted(vote=make_vote(PLAN, 0, step)))
        play.end()
    assert play.hands.killed == []
    assert read_events(play.folder) == play.seen
    assert [event.step for event in play.seen if isinstance(event, StepRecorded)] == list(range(9))


def test_workers_may_forget_a_vote_only_once_the_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(tmp_path, sync_s=0.0)
    synced: list[int] = []

    def sync() -> bool:
        synced.append(len(read_events(play.folder)))
        if len(synced) == 2:
            play.mailbox.post(StopRequested("enough", 0))
        return len(synced) > 1  # the disk is full, and then it is not

    monkeypatch.setattr(play.journal, "sync", sync)
    play.manager.run()
    play.journal.close()
    told = [(name, message.step) for name, message in play.hands.sent if isinstance(message, Recorded)]
    assert told == [(name, 0) for name in MEMBERS]
    assert len(synced) == 2


def test_a_promise_is_in_the_journal_before_it_is_made(play: Play) -> None:
    asked: list[tuple[bool, list[RunEvent]]] = []

    def ask() -> None:
        kept = play.mailbox.post_request(FinishRequested("enough"))
        asked.append((kept, read_events(play.folder)))
        play.mailbox.post(StopRequested("now", 0))

    thread = threading.Thread(target=ask)
    thread.start()
    play.manager.run()
    thread.join(10)
    [(kept, events)] = asked
    assert kept
    assert Asked(what="stop", reason="enough") in events
    assert not play.mailbox.post_request(FinishRequested("again"), bound_s=0.01)  # the manager has ended


def test_a_loss_that_is_no_number_is_said_when_it_begins(play: Play) -> None:
    for step, loss in enumerate([2.0, float("nan"), float("inf"), 2.0, float("nan")], start=1):
        vote = make_vote(PLAN, 0, step)
        first = next(place for place, value in enumerate(vote.vector) if value == step)
        vector = (*vote.vector[:first], loss, *vote.vector[first + 1 :])
        play.say("w0", Voted(vote=vote.model_copy(update={"vector": vector})))
    play.end()
    warnings = [event.text for event in play.seen if isinstance(event, Notice) and event.warning]
    assert [text.partition(". The run continues")[0] for text in warnings] == [
        "the loss of step 2 is nan",
        "the loss of step 5 is nan",
    ]


class HungStore(CheckpointCoordinator):
    """Does not say which checkpoint is the newest, until it is let."""

    def __init__(self) -> None:
        super().__init__(new=False, overwrite=False, warn=lambda text: None)
        self.asked, self.let = threading.Event(), threading.Event()

    def newest(self, job: JobFacts, *, waits: bool = True) -> Checkpoint | None:
        self.asked.set()
        assert self.let.wait(60)
        return None


def test_while_a_store_hangs_beats_are_heard_status_is_answered_and_stop_is_obeyed(tmp_path: Path) -> None:
    store = HungStore()
    play = Play(tmp_path, store, FleetConfig(workers=4, replace=False, store_patience_s=0.5), hung_s=0.2)
    said: list[object] = []

    def visit() -> None:
        assert store.asked.wait(10)
        for step in range(5):  # a second, in which the lease of whoever is not heard would be over
            play.mailbox.post(MessageReceived("w1", Beat(generation=-1, step=step, activity="waits")))
            time.sleep(0.2)
        fleet = play.manager.fleet
        beat = fleet.workers["w1"].beat
        said.extend([beat.step if beat else None, describe(fleet, time.monotonic())["state"], type(fleet.phase)])
        said.append(play.mailbox.post_request(FinishRequested("enough"), bound_s=2.0))

    visitor = threading.Thread(target=visit)
    visitor.start()
    began_s = time.monotonic()
    ended = play.manager.run()
    visitor.join(10)
    store.let.set()
    play.journal.close()
    assert said == [4, "starting: None has not said for 0 s which checkpoint is its newest", Idle, True]
    assert ended is not None
    assert ended.exit_code == 0
    assert "no step is running" in ended.text
    assert time.monotonic() - began_s < 10
    assert any(isinstance(event, Notice) and event.text.startswith("waiting for the store") for event in play.seen)


def test_when_a_store_that_hung_answers_the_run_begins(tmp_path: Path) -> None:
    store = HungStore()
    play = Play(tmp_path, store)
    threading.Timer(0.5, store.let.set).start()
    play.end()
    play.journal.close()
    assert [event.record.generation for event in play.seen if isinstance(event, GenerationStarted)] == [0]
    assert [event.step for event in play.seen if isinstance(event, StepRecorded)] == [0]
