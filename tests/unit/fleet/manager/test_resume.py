"""A manager that starts again: what its journal says, and what agents repeat, is all it needs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fleet.support import Driver, make_job, make_vote, two_stages, with_history
from varuna.core.messages import Assign, Beat, Hello, Hold, Leaving, RaiseFlag, StopReport, Suspect, Voted
from varuna.fleet.manager.reconcile import Reconciliation, node_of, reconcile
from varuna.fleet.manager.resume import KnownCheckpoint, known_checkpoint, lost_workers, resume
from varuna.fleet.net.protocol import WorkerSnapshot
from varuna.fleet.run_folder.journal import Journal, Past
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    DrainRequested,
    FinishRequested,
    MorphRequested,
    Tick,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Instruction, Publish, Send
from varuna.fleet.state.phases import Running, Stopping
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import (
    Answered,
    Asked,
    CheckpointCommitted,
    GenerationStarted,
    RunEnded,
    StepRecorded,
)
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.stutter import Straggler

NAMES = ("n0-a.0", "n0-a.1", "n1-b.0", "n1-b.1")
CONFIG = FleetConfig(workers=4, elastic=True, replace=False, wait_s=float("inf"))


class Shell:
    """A driver whose events reach the disk, and whose manager can die."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder, None)
        self.journal.begin_run("r")
        self.driver = Driver(CONFIG, plan=two_stages)
        self.written = 0
        for name in NAMES:
            self.driver.feed(WorkerSpawned(name, node=name.rpartition(".")[0]))
        for name in NAMES:
            self.say(name, self.hello(name))

    def hello(self, name: str) -> Hello:
        return Hello(worker=name, pid=1, version="1", job=self.driver.job)

    def write(self) -> None:
        for done in self.driver.done[self.written :]:
            if isinstance(done, Publish):
                if (
                    isinstance(done.event, GenerationStarted)
                    and done.event.record.generation == done.event.record.began
                ):
                    self.journal.keep_job(self.driver.job, "1", "2")
                vote = (
                    self.driver.fleet.recorded.votes.get(done.event.step)
                    if isinstance(done.event, StepRecorded)
                    else None
                )
                self.journal.append(done.event, vote=vote)
        self.written = len(self.driver.done)

    def say(self, worker: str, message: Hello | Voted | StopReport | Suspect | Beat | Leaving) -> None:
        self.driver.say(worker, message)
        self.write()

    def vote(self, step: int) -> None:
        fleet = self.driver.fleet
        self.say(fleet.members[0], Voted(vote=make_vote(fleet.record.plan, fleet.generation, step)))

    def die_and_start_again(self) -> Fleet:
        """Nothing is left but the journal."""
        self.journal.close()
        self.journal = Journal(self.folder, None)
        past = self.journal.read()
        assert past is not None
        self.driver.now_s += 1000
        self.driver.fleet = resume(past, CONFIG, self.driver.now_s)
        self.driver.feed(Tick())
        return self.driver.fleet

    def reconcile(self, node: str, *snapshots: WorkerSnapshot) -> list[str]:
        past = self.journal.read()
        assert past is not None
        events, fenced = reconcile(self.driver.fleet, lost_workers(past), Reconciliation(node, snapshots))
        for event in events:
            self.driver.feed(event)
        self.write()
        return fenced

    def snapshot(self, name: str, *said: StopReport | Suspect | Voted, generation: int = 0) -> WorkerSnapshot:
        return WorkerSnapshot(worker=name, said=(self.hello(name), *said), generation=generation)

    def held(self, name: str, next_step: int) -> StopReport:
        fleet = self.driver.fleet
        stage = fleet.record.plan.place_of(fleet.members.index(name)).stage
        votes = (make_vote(fleet.record.plan, fleet.generation, next_step - 1),)
        sections = tuple(fleet.record.plan.first.sections_of(stage))
        return StopReport(generation=fleet.generation, next_step=next_step, sections=sections, votes=votes)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.journal.close()


def test_a_running_generation_goes_on_as_if_nothing_had_happened(shell: Shell) -> None:
    shell.vote(0)
    shell.vote(1)
    before = shell.driver.fleet
    fleet = shell.die_and_start_again()
    assert isinstance(fleet.phase, Running)
    assert (fleet.generation, fleet.members, fleet.recorded.step) == (0, before.members, 1)
    assert (fleet.job, fleet.generations.micro_batch, fleet.recorded.votes) == (
        before.job,
        before.generations.micro_batch,
        before.recorded.votes,
    )
    sent = len(shell.driver.done)
    plan = fleet.record.plan
    unrecorded = [Voted(vote=make_vote(plan, 0, step)) for step in (2, 3, 4)]  # trained while nobody managed
    shell.reconcile("n0-a", shell.snapshot("n0-a.0", *unrecorded), shell.snapshot("n0-a.1"))
    shell.reconcile("n1-b", shell.snapshot("n1-b.0"), shell.snapshot("n1-b.1"))
    shell.driver.wait(8)
    assert shell.driver.fleet.recorded.step == 4
    assert shell.driver.fleet.generation == 0
    told = [done.message for done in shell.driver.done[sent:] if isinstance(done, Send)]
    assert not [message for message in told if isinstance(message, Assign | Hold)]


def test_a_script_goes_on_in_the_training_that_it_was_in(shell: Shell) -> None:
    steps = shell.driver.job.steps
    for step in range(steps):
        shell.vote(step)
    shell.journal.append(CheckpointCommitted(step=steps))
    for name in NAMES:
        shell.say(name, Leaving(step=steps))
        shell.say(name, shell.hello(name).model_copy(update={"training": 1}))
    shell.vote(0)
    before = shell.driver.fleet
    fleet = shell.die_and_start_again()
    assert (before.training, before.generation, before.recorded.step) == (1, 1, 0)
    assert (fleet.training, fleet.generation, fleet.recorded.step, fleet.recorded.saved_step) == (1, 1, 0, 0)
    assert (fleet.script.trainings, fleet.history[0].began, fleet.recorded.votes) == (
        before.script.trainings,
        1,
        before.recorded.votes,
    )


def test_a_manager_that_missed_the_end_of_a_training_hears_of_it(shell: Shell) -> None:
    steps = shell.driver.job.steps
    for step in range(steps - 1):
        shell.vote(step)
    shell.die_and_start_again()
    said = [
        (
            name,
            WorkerSnapshot(
                worker=name,
                said=(
                    shell.hello(name),
                    *(
                        [Voted(vote=make_vote(shell.driver.fleet.record.plan, 0, steps - 1))]
                        if name == NAMES[0]
                        else []
                    ),
                    Leaving(step=steps),
                    shell.hello(name).model_copy(update={"training": 1}),
                ),
                generation=0,
            ),
        )
        for name in NAMES
    ]
    for node in ("n0-a", "n1-b"):
        shell.reconcile(node, *(snapshot for name, snapshot in said if node_of(name) == node))
    fleet = shell.driver.fleet
    assert (fleet.training, fleet.script.trainings[0].steps) == (1, steps)
    assert set(fleet.members) == set(NAMES)


def test_the_newest_checkpoint_is_known_before_anybody_speaks(shell: Shell) -> None:
    shell.vote(0)
    shell.journal.append(CheckpointCommitted(step=1))
    assert shell.die_and_start_again().recorded.saved_step == 1


def test_who_does_not_come_back_is_lost_after_one_lease_and_not_before(shell: Shell) -> None:
    shell.vote(0)
    shell.die_and_start_again()
    shell.reconcile("n0-a", shell.snapshot("n0-a.0"), shell.snapshot("n0-a.1"))
    gone = {"n1-b.0", "n1-b.1"}
    shell.driver.wait(CONFIG.lease_s - 0.5, hidden=("n1-b",))
    assert isinstance(shell.driver.fleet.phase, Running)
    assert gone <= set(shell.driver.fleet.joined)
    shell.driver.wait(9.0, hidden=("n1-b",))
    assert isinstance(shell.driver.fleet.phase, Stopping)
    for name in shell.driver.fleet.live_members:
        shell.say(name, shell.held(name, 1))
    assert not gone & set(shell.driver.fleet.workers)


def test_a_generation_that_nobody_was_told_of_is_given_up_and_its_number_is_not_used_again(shell: Shell) -> None:
    shell.vote(0)
    shell.driver.kill("n1-b.1")
    for name in NAMES[:3]:
        shell.say(name, shell.held(name, 1))
    assert shell.driver.fleet.generation == 1  # written down, and then the manager dies before it tells anyone
    shell.die_and_start_again()
    assert shell.driver.fleet.generation == 1
    old = with_history(shell.driver.fleet, shell.driver.fleet.history[:1])
    for node, names in (("n0-a", NAMES[:2]), ("n1-b", NAMES[2:3])):
        shell.reconcile(node, *(shell.snapshot(name, generation=0) for name in names))
    shell.driver.wait(2)
    assert isinstance(shell.driver.fleet.phase, Stopping)
    for name in shell.driver.fleet.live_members:
        shell.say(name, StopReport(generation=1, next_step=1, sections=_sections(old, name)))
    assert shell.driver.fleet.generation == 2


def test_a_vote_of_a_timeline_that_a_rollback_abandoned_does_not_count_for_the_next_manager_either(
    shell: Shell,
) -> None:
    for step in range(4):
        shell.vote(step)
    shell.driver.checkpoint = Checkpoint("ck/step-2", 2, 2)
    [*first], [*second] = ([name for name in NAMES if each in shell.driver.seat_sections(name)] for each in (0, 2))
    stale = {name: shell.held(name, 4) for name in first}
    for name in second:
        shell.driver.kill(name)
    for name in first:
        shell.say(name, stale[name])
    shell.driver.wait(2)
    shell.write()
    assert (shell.driver.fleet.generation, shell.driver.fleet.recorded.step) == (1, 1)
    shell.die_and_start_again()
    for name in first:
        shell.reconcile(node_of(name), shell.snapshot(name, generation=1))
    shell.say(first[0], stale[first[0]].model_copy(update={"generation": 1}))  # it had not reloaded yet
    assert (shell.driver.fleet.recorded.votes, shell.driver.fleet.recorded.step) == ({}, 1)


def _sections(fleet: Fleet, name: str) -> tuple[int, ...]:
    plan = fleet.record.plan
    return tuple(plan.first.sections_of(plan.place_of(fleet.members.index(name)).stage))


def test_a_lost_worker_that_comes_back_is_killed(shell: Shell) -> None:
    shell.vote(0)
    shell.driver.kill("n1-b.1")
    shell.write()
    shell.die_and_start_again()
    assert shell.reconcile("n1-b", shell.snapshot("n1-b.0"), shell.snapshot("n1-b.1")) == ["n1-b.1"]
    assert "n1-b.1" not in shell.driver.fleet.workers


def test_workers_of_an_agent_that_started_again_are_gone(shell: Shell) -> None:
    events, _ = reconcile(shell.driver.fleet, set(), Reconciliation("n1-b", ()))
    assert [event.worker for event in events if isinstance(event, WorkerExited)] == ["n1-b.0", "n1-b.1"]


def test_what_people_were_promised_is_kept_by_the_next_manager(shell: Shell) -> None:
    shell.vote(0)
    for wish in (DrainRequested("n1-b"), MorphRequested(), FinishRequested("enough")):
        shell.driver.feed(wish)
    shell.write()
    sent = len(shell.driver.done)
    fleet = shell.die_and_start_again()
    assert (fleet.requests.finish, fleet.requests.morph is not None, list(fleet.machines.departing)) == (
        "enough",
        True,
        ["n1-b"],
    )
    shell.reconcile("n0-a", shell.snapshot("n0-a.0"), shell.snapshot("n0-a.1"))
    shell.reconcile("n1-b", shell.snapshot("n1-b.0"), shell.snapshot("n1-b.1"))
    flags = [(d.worker, d.message.flag) for d in shell.driver.done[sent:] if _is_flag(d)]  # type: ignore[union-attr]
    assert ("n0-a.0", "stop") in flags
    assert flags.count(("n0-a.0", "stop")) == 2  # again once it is met: nobody was there the first time


def test_a_promise_that_was_kept_is_not_kept_again(shell: Shell) -> None:
    shell.vote(0)
    shell.journal.append(Asked(what="drain", node="n1-b"))
    shell.journal.append(Asked(what="morph"))
    shell.journal.append(Answered(what="drain", node="n1-b"))
    shell.journal.append(Answered(what="morph"))
    fleet = shell.die_and_start_again()
    assert (fleet.requests.finish, fleet.requests.morph, fleet.machines.departing) == (None, None, {})


def _is_flag(done: Instruction) -> bool:
    return isinstance(done, Send) and isinstance(done.message, RaiseFlag)


def test_a_run_that_ended_is_history_and_numbers_start_again(shell: Shell) -> None:
    shell.vote(0)
    shell.journal.append(RunEnded(exit_code=0, text="done"))
    assert shell.journal.read() is None
    shell.journal.begin_run("next")
    past = shell.journal.read()
    assert past is not None
    assert (past.run, past.job, past.events) == ("next", None, ())
    assert isinstance(read_events(shell.folder)[-1], RunEnded)


def test_spares_of_a_plan_that_left_somebody_out_are_planned_for_anew(shell: Shell) -> None:
    """The plan was made for fewer workers than there were: it is not known to be the best for all of them."""
    shell.vote(0)
    slow = {NAMES[3]: Straggler(ratio=9.0, until_s=float("inf"))}
    shell.driver.fleet = replace(shell.driver.fleet, speeds=Speeds(slow=slow))
    shell.driver.wait(1.0)
    shell.vote(1)
    for name in shell.driver.fleet.members:
        shell.say(name, shell.held(name, 2))
    assert shell.driver.fleet.record.plan.workers == 2
    shell.vote(2)
    fleet = shell.die_and_start_again()
    snapshots = {name: shell.snapshot(name, generation=1) for name in NAMES}
    shell.reconcile("n0-a", snapshots[NAMES[0]], snapshots[NAMES[1]])
    shell.reconcile("n1-b", snapshots[NAMES[2]], snapshots[NAMES[3]])
    for step in range(3, 7):
        shell.driver.wait(1.0)
        shell.vote(step)
        if isinstance(shell.driver.fleet.phase, Stopping):
            break
    for rank, name in enumerate(fleet.members):
        held = shell.held(name, step + 1) if rank < 2 else StopReport(generation=1, next_step=None, sections=())
        shell.say(name, held)
    assert shell.driver.fleet.generation == 2
    assert shell.driver.fleet.record.plan.workers == 4


def test_the_next_manager_knows_who_was_slow_when_the_plan_was_made(shell: Shell) -> None:
    shell.vote(0)
    slow = {NAMES[3]: Straggler(ratio=2.0, until_s=float("inf"), speed=0.5)}
    shell.driver.fleet = replace(shell.driver.fleet, speeds=Speeds(slow=slow))
    shell.driver.wait(1.0)
    shell.vote(1)
    for name in shell.driver.fleet.members:
        shell.say(name, shell.held(name, 2))
    shell.write()
    plan = shell.driver.fleet.record.plan
    assert plan.speeds == (1.0, 0.5)
    fleet = shell.die_and_start_again()
    assert fleet.record.plan == plan
    assert {straggler.speed for straggler in fleet.speeds.slow.values()} == {0.5}
    assert fleet.speeds.slow.keys() == set(fleet.record.grid[2:])


def test_the_next_manager_plans_for_the_losses_that_the_last_one_saw(shell: Shell) -> None:
    shell.vote(0)
    shell.driver.kill(NAMES[1])
    for name in (NAMES[0], *NAMES[2:]):
        shell.say(name, shell.held(name, 1))
    shell.write()
    seen = shell.driver.fleet.record.losses_per_hour
    assert shell.driver.fleet.generation == 1
    assert 1 < seen < 3, "one loss soon after the begin"
    assert shell.driver.assignments[NAMES[0]].losses_per_hour == seen, "workers save their state as often as pays"
    fleet = shell.die_and_start_again()
    assert fleet.loss_rate.planned_per_hour == seen
    assert fleet.loss_rate.to_plan_for(shell.driver.now_s) == seen


def test_what_was_committed_must_be_found_again() -> None:
    def known(*steps: int) -> int | None:
        job = make_job().model_copy(update={"checkpoint_dir": "/c"})
        events = tuple(CheckpointCommitted(step=step) for step in steps)
        found = known_checkpoint(Past(run="r", job=job, events=events))
        assert found is None or found == KnownCheckpoint("/c", found.step)
        return None if found is None else found.step

    assert known() is None
    assert known(10, 20) == 20
    assert known(10, 20, 15) == 15
