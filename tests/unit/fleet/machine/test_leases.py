"""Silence and its meanings: cables that are out, machines that are gone, managers that could not hear."""

import sys
from typing import Any

import pytest

from tests.unit.fleet.support import Driver, preempted, sends, two_stages
from varuna.core.messages import (
    Apply,
    Beat,
    FromWorker,
    Hello,
    Hold,
    RaiseFlag,
    Recorded,
    StopReport,
    Suspect,
    TrainingOver,
)
from varuna.core.vote import VoteLayout
from varuna.fleet.machine.advance import advance
from varuna.fleet.page.status import describe
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import (
    CheckpointCompleted,
    ConnectionLost,
    DrainRequested,
    FinishRequested,
    Heard,
    NodeParted,
    Tick,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Instruction, Kill, Publish
from varuna.fleet.state.phases import Idle, Running, Stopping
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import GenerationStarted, Notice, StepRecorded, VerdictReached, WorkerLost
from varuna.fleet.state.worker import WorkerInventory, WorkerStatus


def on_machines(
    nodes: str, *, steps: tuple[int, ...] = (0, 1), kind: type[Driver] = Driver, **options: object
) -> Driver:
    """A run over cables, 2 stages, with a worker on each machine named: ``"aab"`` is two on a and one on b."""
    config = FleetConfig(workers=len(nodes), elastic=True, replace=False, wait_s=float("inf"), **options)  # type: ignore[arg-type]
    driver = kind(config, plan=two_stages)
    for number, node in enumerate(nodes):
        driver.feed(WorkerSpawned(f"w{number}", node))
    driver.gather()
    for step in steps:
        driver.now_s += 0.5
        driver.feed(Tick())
        driver.voted(step)
    return driver


def train(driver: Driver, seconds: float, *, hidden: tuple[str, ...] = (), every_s: float = 1.0) -> None:
    """Steps go on: each rank's beat says so, and rank 0 reports them if its machine is heard."""
    end_s = driver.now_s + seconds
    step = driver.fleet.recorded.step
    while driver.now_s < end_s:
        driver.wait(every_s, hidden=hidden, still=False)
        step += 1
        for name in driver.fleet.joined:
            if driver.fleet.workers[name].node not in hidden:
                driver.say(name, Beat(generation=driver.fleet.generation, step=step + 1, activity=""))
        if driver.fleet.workers[driver.fleet.members[0]].node not in hidden:
            driver.voted(step)


def stop(driver: Driver, *names: str, next_step: int) -> None:
    for name in names:
        driver.held(name, next_step)


def lost(driver: Driver) -> set[str]:
    return {event.worker for event in driver.told(WorkerLost)}


def said(driver: Driver, text: str) -> bool:
    return any(text in notice.text for notice in driver.told(Notice))


ALL = ("a", "b", "c", "d")


# -- the manager's own isolation -------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [2, 12, 60, 3600])
def test_a_manager_that_is_cut_off_gives_nobody_up(seconds: float) -> None:
    driver = on_machines("abcd")
    driver.wait(seconds, hidden=ALL)
    for node in ALL:  # all come back as they were, one after another, and some take their time
        driver.wait(1.0, hidden=ALL[ALL.index(node) + 1 :], still=False)
    train(driver, 10)
    assert not lost(driver)
    assert not sends(driver.done, Hold)
    assert driver.fleet.generation == 0
    assert said(driver, "this manager is cut off") == (seconds > 6)
    assert driver.fleet.listened_s < 20


def test_who_died_while_the_manager_was_cut_off_is_found_after_one_lease() -> None:
    driver = on_machines("abcd")
    driver.wait(30, hidden=ALL)
    driver.wait(5.5, hidden=("d",))
    assert isinstance(driver.fleet.phase, Running)
    driver.wait(1.5, hidden=("d",))
    stop(driver, "w0", "w1", "w2", next_step=2)
    assert lost(driver) == {"w3"}
    assert driver.fleet.generation == 1


@pytest.mark.parametrize("ticks", [0, 2])
def test_connections_that_end_because_the_manager_was_cut_off_are_no_evidence(ticks: int) -> None:
    driver = on_machines("abcd")
    driver.wait(12, hidden=ALL)
    driver.say("w0", Beat(generation=0, step=2, activity=""))
    assert said(driver, "machines are back in contact")
    driver.wait(0.2 * ticks, hidden=("b", "c", "d"))
    for node in ("b", "c", "d"):  # what is left of their old connections arrives before the new ones
        driver.feed(NodeParted(node))
    driver.say("w0", Suspect(generation=0, reason="?"))
    driver.wait(0.8, hidden=("b", "c", "d"))
    assert not lost(driver)
    driver.wait(4, still=False)
    stop(driver, "w0", "w1", "w2", "w3", next_step=2)
    assert driver.fleet.live_members == ("w0", "w1", "w2", "w3")


def test_a_server_that_stood_still_counts_nobodys_silence_over_cables_either() -> None:
    driver = on_machines("abcd")
    for _ in range(100):
        driver.now_s += 0.2
        driver.feed(Tick(deaf_s=0.2))
    driver.wait(1, still=False)
    assert not lost(driver)


# -- one machine out of sight -----------------------------------------------------------------------------


def test_while_steps_go_on_a_machine_out_of_sight_is_left_in_peace_and_that_is_said_once() -> None:
    driver = on_machines("abcd")
    train(driver, 120, hidden=("d",))
    assert not lost(driver)
    assert driver.fleet.is_hidden("d")
    assert sum("node d is out of sight" in notice.text for notice in driver.told(Notice)) == 1
    train(driver, 5)
    assert not driver.fleet.is_hidden("d")
    assert said(driver, "node d is back in contact")
    assert driver.fleet.generation == 0


def _calls_of_a_tick(silent: int) -> int:
    """Calls of functions in one tick, while steps go on without a word from this many machines."""
    nodes = [f"n{number}" for number in range(silent)]
    config = FleetConfig(workers=silent + 1, elastic=True, replace=False, wait_s=float("inf"))
    driver = Driver(config, plan=lambda job, workers, micro_batch: two_stages(job, 4, micro_batch))
    for number, node in enumerate(["near", *nodes]):
        driver.feed(WorkerSpawned(f"w{number}", node))
    driver.gather()
    driver.now_s += 0.5
    driver.voted(0)
    train(driver, 10, hidden=tuple(nodes))
    assert len(driver.fleet.contacts.hidden) == silent
    assert not lost(driver)
    calls = []
    for _ in range(3):  # one of them may look at all machines, as is done once in a lease
        driver.now_s += 0.1
        calls.append(0)

        def count(*_: object) -> None:
            calls[-1] += 1

        sys.setprofile(count)
        advance(driver.fleet, Tick(), driver.now_s)
        sys.setprofile(None)
    return min(calls)


def test_a_tick_does_not_cost_more_with_more_machines_out_of_sight() -> None:
    assert _calls_of_a_tick(60) == _calls_of_a_tick(6)


def test_main_rank_out_of_sight_other_ranks_beats_prove_that_steps_go_on() -> None:
    driver = on_machines("abcd")
    train(driver, 60, hidden=("a",))
    assert not lost(driver)
    assert driver.fleet.recorded.step == 1  # no step is reported, but all ranks live
    driver.wait(1, still=False)
    driver.voted(*range(2, 62))
    assert driver.fleet.recorded.step == 61


@pytest.mark.parametrize("at_work", ["w0", "w2"])
def test_a_step_that_takes_minutes_is_no_step_that_stands_still(at_work: str) -> None:
    driver = on_machines("abcd")
    driver.wait(120, hidden=("d",), at_work=(at_work,))  # the others wait for it
    assert isinstance(driver.fleet.phase, Running)
    assert not lost(driver)


@pytest.mark.parametrize(("seconds", "phase"), [(26, Running), (33, Stopping)])
def test_waits_that_are_usual_here_are_no_evidence(seconds: float, phase: type) -> None:
    driver = on_machines("abcd")
    driver.wait(20, still=True)  # all wait for rank 3, which then goes on
    train(driver, 3)
    driver.wait(seconds, hidden=("d",))
    assert isinstance(driver.fleet.phase, phase)


def test_one_long_wait_does_not_make_a_later_loss_slow() -> None:
    driver = on_machines("abcd")
    driver.wait(50, still=True)  # a hiccup of the network
    train(driver, 120)
    driver.wait(9, hidden=("d",))
    assert isinstance(driver.fleet.phase, Stopping)


def test_a_machine_out_of_sight_is_put_aside_when_the_step_stands_still() -> None:
    driver = on_machines("abcd")
    driver.wait(6.6, hidden=("d",))
    assert driver.fleet.workers["w3"].standing is WorkerStatus.UNREACHABLE
    assert [name for name, _ in sends(driver.done, Hold)] == ["w0", "w1", "w2"]
    assert not any(isinstance(item, Kill) for item in driver.done)
    stop(driver, "w0", "w1", "w2", next_step=2)
    assert driver.fleet.record.cause == "node d is out of sight, and the step stood still"
    assert (driver.fleet.record.first_step, driver.fleet.record.steps_redone) == (2, 1)
    assert lost(driver) == {"w3"}
    assert [item.worker for item in driver.done if isinstance(item, Kill)] == ["w3"]
    order = [type(item.event) for item in driver.done if isinstance(item, Publish)]
    assert order.index(WorkerLost) < len(order) - 1 - order[::-1].index(GenerationStarted)  # fenced off first


def test_a_spare_that_holds_up_the_beginning_of_a_generation_is_given_up_like_a_rank() -> None:
    driver = on_machines("abcde", steps=())
    driver.wait(60, hidden=("e",))
    assert driver.fleet.workers["w4"].standing is WorkerStatus.UNREACHABLE
    stop(driver, "w0", "w1", "w2", "w3", next_step=0)
    assert lost(driver) == {"w4"}
    assert driver.fleet.live_members == ("w0", "w1", "w2", "w3")


def test_who_is_heard_before_the_next_generation_is_written_down_is_taken_back_with_what_it_committed() -> None:
    driver = on_machines("abcd")
    vote = driver.vote(2)
    driver.wait(6.6, hidden=("d",))
    stop(driver, "w0", "w1", next_step=2)  # w2 is slow
    assert [name for name, _ in sends(driver.say("w3", Beat(generation=0, step=3, activity="")), Hold)] == ["w3"]
    driver.held("w2", 2)
    assert driver.fleet.generation == 0  # its answer is awaited
    driver.held("w3", 3, votes=(vote,))
    assert [name for name, _ in sends(driver.done, Apply)] == ["w0", "w1", "w2"]
    stop(driver, "w0", "w1", "w2", next_step=3)
    assert not lost(driver)
    assert set(driver.fleet.record.members) == {"w0", "w1", "w2", "w3"}
    assert (driver.fleet.record.first_step, driver.fleet.record.steps_redone) == (3, 0)


def test_who_is_heard_while_the_run_waits_for_machines_is_taken_back() -> None:
    driver = on_machines("ab")
    driver.wait(7, hidden=("b",))
    driver.held("w0", 2)
    driver.wait(10, hidden=("b",))
    assert not driver.told(VerdictReached)
    driver.say("w1", Beat(generation=0, step=2, activity=""))
    assert isinstance(driver.fleet.phase, Stopping)
    driver.held("w1", 2)
    assert (driver.fleet.generation, driver.fleet.record.first_step, driver.fleet.record.rollback) == (1, 2, False)
    assert not lost(driver)


def test_evidence_needs_somebody_who_is_heard() -> None:
    driver = on_machines("abcd", steps=(0,))
    driver.wait(5, hidden=("d",))
    driver.wait(600, hidden=ALL)
    assert isinstance(driver.fleet.phase, Running)
    assert not lost(driver)


# -- state that nobody else holds ----------------------------------------------------------------------------


def test_state_out_of_sight_is_waited_for_as_long_as_doing_it_again_would_take() -> None:
    driver = on_machines("abc", steps=())
    train(driver, 40)  # 40 steps of a second
    driver.checkpoint = Checkpoint("ck/step-20", 20, 2)
    driver.feed(CheckpointCompleted(20))
    driver.wait(7, hidden=("b",))
    driver.held("w0", 40)
    driver.held("w2", None)
    assert said(driver, "for state that no other worker holds")
    driver.wait(11, hidden=("b",))
    assert isinstance(driver.fleet.phase, Stopping)
    driver.wait(4, hidden=("b",))
    assert driver.fleet.record.rollback
    assert driver.fleet.record.first_step == 20
    assert lost(driver) == {"w1"}


def test_state_that_comes_back_meanwhile_is_not_rolled_back() -> None:
    driver = on_machines("abc", steps=())
    train(driver, 40)
    driver.wait(7, hidden=("b",))
    driver.held("w0", 40)
    driver.held("w2", None)
    driver.wait(20, hidden=("b",))
    driver.say("w1", StopReport(generation=0, next_step=40, sections=(2, 3)))
    assert (driver.fleet.record.rollback, driver.fleet.record.first_step, lost(driver)) == (False, 40, set())


@pytest.mark.parametrize("evidence", ["its agent says so", "its system says so", "a notice said so", "none"])
def test_the_dead_are_not_waited_for(evidence: str) -> None:
    driver = on_machines("abc", steps=())
    train(driver, 40)
    match evidence:
        case "its system says so":
            driver.feed(NodeParted("b", abruptly=True))
        case "a notice said so":
            driver.feed(preempted("b", in_s=5))
    driver.wait(7, hidden=("b",))
    driver.held("w0", 40)
    driver.held("w2", None)
    if evidence == "its agent says so":
        driver.kill("w1")
    went_on = driver.fleet.generation > 0
    assert went_on == (evidence != "none")
    assert driver.fleet.record.rollback


def test_state_that_goes_out_of_sight_between_generations_is_waited_for_too() -> None:
    driver = on_machines("abc", steps=(), futile_s=600.0)
    train(driver, 40)
    for _ in range(7):  # one generation after the other breaks
        driver.breaks({"w0": 40, "w1": 40, "w2": None})
        driver.wait(20, still=False)
    driver.breaks({"w0": 40, "w1": 40, "w2": None})
    assert isinstance(driver.fleet.phase, Idle)
    driver.wait(35, hidden=("b",), still=False)
    assert isinstance(driver.fleet.phase, Idle)
    driver.say("w1", StopReport(generation=driver.fleet.generation, next_step=40, sections=(2, 3)))
    driver.wait(5, still=False)
    assert (driver.fleet.record.rollback, driver.fleet.record.first_step, lost(driver)) == (False, 40, set())


def test_a_grid_that_is_out_of_sight_as_a_whole_is_not_disturbed_for_as_long() -> None:
    driver = on_machines("aabbc", steps=())
    train(driver, 40)
    driver.wait(30, hidden=("a", "b"))
    assert isinstance(driver.fleet.phase, Running)
    driver.wait(12, hidden=("a", "b"))
    assert isinstance(driver.fleet.phase, Stopping | Idle)
    assert not lost(driver)


# -- what is evidence at once -----------------------------------------------------------------------------------


def test_a_worker_that_is_silent_while_its_machine_is_heard_is_frozen() -> None:
    driver = on_machines("aabb")
    driver.wait(6.6, silent=("w1",), still=False)
    assert lost(driver) == {"w1"}
    assert any(isinstance(item, Kill) and item.worker == "w1" for item in driver.done)


@pytest.mark.parametrize("trains", [True, False])
def test_an_agent_that_stood_still_costs_none_of_its_workers(trains: bool) -> None:
    """Say whether steps went on while the agent was silent, or one step took longer than the silence."""
    driver = on_machines("aabb")
    if trains:
        train(driver, 20, hidden=("b",))
    else:
        driver.wait(20, hidden=("b",), still=False)
    driver.feed(Heard(("b",)))  # its pulse comes before its workers' beats
    driver.feed(Tick())
    train(driver, 3)
    assert not lost(driver)


class Terse(Driver):
    """A driver whose workers say only that they live, where a beat is as the one before."""

    left_out = 0

    def say(self, worker: str, message: FromWorker) -> list[Instruction]:
        known = self.fleet.workers.get(worker)
        if known is None or known.beat != message:
            return super().say(worker, message)
        self.left_out += 1
        return self.feed(Heard((known.node,), (worker,)))


def test_beats_that_are_as_before_need_not_be_said_again() -> None:
    """Two runs with the same silences; the second hears of a beat only if it is news."""
    drivers = [on_machines("aabbcd", kind=kind) for kind in (Driver, Terse)]
    for driver in drivers:
        driver.wait(5, still=False)
        train(driver, 12, hidden=("b",))
        driver.wait(8, still=False, hidden=("c",))
        driver.wait(40, silent=("w0",), still=False)
        driver.feed(Heard(("e",), ("nobody",)))
    full, terse = drivers
    assert isinstance(terse, Terse)
    assert terse.left_out > 100
    assert lost(full) == {"w0"}
    assert terse.done == full.done
    assert terse.fleet == full.fleet


def test_a_closed_connection_and_a_broken_link_are_a_loss_at_once() -> None:
    driver = on_machines("abcd")
    driver.say("w0", Suspect(generation=0, reason="link to rank 3 broke"))
    driver.feed(NodeParted("d"))
    assert lost(driver) == {"w3"}


def test_a_closed_connection_alone_is_none_while_steps_go_on() -> None:
    driver = on_machines("abcd")
    driver.feed(NodeParted("d"))
    train(driver, 30, hidden=("d",))
    driver.say("w0", Suspect(generation=0, reason="link to rank 1 broke"))  # d has shown since that it lives
    driver.wait(2, hidden=("d",))
    assert not lost(driver)
    assert driver.fleet.is_joined("w3")


# -- who is not dead, but could not be told of a part ----------------------------------------------------------------


def joins(driver: Driver, name: str, node: str) -> None:
    driver.feed(WorkerSpawned(name, node))
    driver.hello(name)


def test_newcomers_that_have_closed_their_connection_are_no_reason_for_a_new_generation() -> None:
    driver = on_machines("abcd")
    for number, node in enumerate("efgh"):
        joins(driver, f"w{number + 4}", node)
    for node in "efgh":
        driver.feed(NodeParted(node))
    train(driver, 5, hidden=tuple("efgh"))
    assert not sends(driver.done, RaiseFlag)
    train(driver, 5)  # they are back, as they were
    assert sends(driver.done, RaiseFlag)
    assert not lost(driver)


@pytest.mark.parametrize("closed", ["its agent's connection", "its own connection"])
def test_who_has_closed_its_connection_has_no_part_in_the_next_generation(closed: str) -> None:
    driver = on_machines("abcd")
    joins(driver, "w4", "e")
    driver.feed(NodeParted("e") if closed == "its agent's connection" else ConnectionLost("w4"))
    driver.kill("w3")
    stop(driver, "w0", "w1", "w2", next_step=2)
    assert driver.fleet.generation == 1
    assert set(driver.fleet.members) == {"w0", "w1", "w2"}
    assert not lost(driver) & {"w4"}


def parts_between_generations(driver: Driver, name: str, *, dead: str) -> None:
    """All stop, since one has died; before the last has, the agent of another says goodbye."""
    driver.wait(1.0, still=False)
    driver.kill(dead)
    driver.held(name, 2 if driver.fleet.record.has_seat(name) else None)
    driver.feed(NodeParted(driver.fleet.workers[name].node))
    stop(driver, *(other for other in driver.fleet.live_members if other != name), next_step=2)
    assert driver.fleet.generation == 1
    assert lost(driver) == {dead}


def test_a_rank_that_parts_between_two_generations_comes_back_as_a_newcomer() -> None:
    driver = on_machines("abcdef")
    parts_between_generations(driver, "w3", dead="w5")
    assert set(driver.fleet.members) == {"w0", "w1", "w2", "w4"}
    assert driver.fleet.workers["w3"].holding == WorkerInventory()  # what it holds is old after the next step
    driver.voted(2)
    joins(driver, "w6", "g")
    train(driver, 5)
    assert sends(driver.done, RaiseFlag)
    stop(driver, *driver.fleet.members, next_step=driver.fleet.recorded.step + 1)
    assert driver.fleet.record.has_seat("w3")
    assert lost(driver) == {"w5"}


def test_who_has_closed_its_connection_has_a_part_if_no_plan_can_do_without_it() -> None:
    driver = on_machines("abc")
    parts_between_generations(driver, "w2", dead="w0")
    assert set(driver.fleet.record.grid) == {"w1", "w2"}


def test_who_leaves_has_a_part_rather_than_who_has_closed_its_connection() -> None:
    driver = on_machines("abcd")
    driver.feed(preempted("b", in_s=300.0))
    parts_between_generations(driver, "w0", dead="w3")
    assert set(driver.fleet.record.grid) == {"w1", "w2"}


def test_who_has_closed_its_connection_has_a_part_if_some_state_is_nowhere_else() -> None:
    driver = on_machines("abcd")
    parts_between_generations(driver, "w1", dead="w3")
    assert "w1" in driver.fleet.members
    assert not driver.fleet.record.rollback


def test_no_morph_is_planned_while_the_connection_to_a_rank_is_closed() -> None:
    driver = on_machines("abcd")
    driver.feed(NodeParted("b"))
    joins(driver, "w4", "e")
    joins(driver, "w5", "f")
    train(driver, 4, hidden=("b",))
    assert not sends(driver.done, RaiseFlag)
    train(driver, 4)
    assert sends(driver.done, RaiseFlag)


def test_steps_of_a_long_absence_are_recorded_by_their_totals_and_the_newest_vote_still_decides() -> None:
    driver = on_machines("abcd")
    plan = driver.fleet.record.plan
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches)
    votes = [driver.vote(step) for step in range(2, 9)]
    votes = [vote.model_copy(update={"tally": layout.tally(vote.vector)}) for vote in votes]
    driver.kill("w0")
    driver.held("w1", 8, votes=(*(vote.shortened() for vote in votes[:5]), votes[5]))
    driver.held("w2", 8, votes=(votes[5],))
    told = driver.held("w3", 9, votes=(votes[5].shortened(), votes[6]))
    assert [event.step for event in driver.told(StepRecorded)] == list(range(9))
    assert {event.loss for event in driver.told(StepRecorded)} == {float(step) for step in range(9)}
    assert [(name, message.vote) for name, message in sends(told, Apply)] == [("w1", votes[6]), ("w2", votes[6])]


# -- what is said to whom ---------------------------------------------------------------------------------------


def test_what_was_asked_of_a_worker_is_said_again_when_it_is_met_again() -> None:
    driver = on_machines("abcd")
    driver.feed(FinishRequested("enough"))
    hello = Hello(worker="w0", pid=1, version="1", job=driver.job)
    assert [flag.flag for _, flag in sends(driver.say("w0", hello), RaiseFlag)] == ["stop"]
    driver.kill("w3")
    assert [name for name, _ in sends(driver.say("w0", hello), Hold)] == ["w0"]
    driver.held("w0", 3, votes=(driver.vote(2),))
    stop(driver, "w1", "w2", next_step=2)
    again = driver.say("w1", hello.model_copy(update={"worker": "w1"}))
    assert [message.vote.step for _, message in sends(again, Apply)] == [2]


def test_a_run_that_waits_for_machines_ends_when_somebody_asks_for_that() -> None:
    driver = on_machines("ab")
    for name in ("w0", "w1"):
        driver.kill(name)
    driver.wait(1)
    assert driver.end is None
    driver.feed(FinishRequested("enough"))
    assert driver.end is not None
    assert driver.end.exit_code == 1
    unused = Driver(FleetConfig(workers=1, elastic=True, replace=False, wait_s=float("inf")), spawns=False)
    unused.feed(FinishRequested("enough"))  # before any worker has said what the job is
    assert unused.end is not None
    assert unused.end.exit_code == 0
    assert driver.end.text.startswith("enough; no step is running, because there are no workers. 2 steps are in no")


def test_records_are_not_piled_up_for_a_machine_out_of_sight() -> None:
    driver = on_machines("abcd")
    before = len(driver.done)
    train(driver, 30, hidden=("d",))
    told = [name for name, _ in sends(driver.done[before:], Recorded)]
    assert told.count("w0") == 30
    assert told.count("w3") <= 3


def test_the_last_step_waits_for_nobody_who_is_out_of_sight_for_ever() -> None:
    driver = on_machines("abcd")
    driver.leave("w0", "w1", "w2")
    driver.wait(30, hidden=("d",))
    assert [name for name, _ in sends(driver.done, TrainingOver)] == ["w3"]
    for name in ("w0", "w1", "w2"):
        driver.kill(name, code=0)
    driver.wait(32, hidden=("d",))  # it may save its part
    assert driver.end is not None
    assert driver.end.exit_code == 0


def test_a_run_that_is_done_does_not_wait_for_the_script_of_a_machine_that_is_gone() -> None:
    driver = on_machines("ab")
    driver.leave("w0", "w1")
    driver.wait(400, hidden=("a", "b"))
    assert driver.end is not None
    assert said(driver, "the outcome of its script is unknown")


def test_no_morph_is_planned_while_a_rank_cannot_be_told() -> None:
    driver = on_machines("aabb", steps=(0,))
    driver.plan = lambda job, workers, m: two_stages(job, workers, m).model_copy(update={"step_s": driver.now_s})
    train(driver, 8, hidden=("b",))
    driver.feed(DrainRequested("b"))
    train(driver, 5, hidden=("b",))
    assert not sends(driver.done, RaiseFlag)
    train(driver, 5)
    assert sends(driver.done, RaiseFlag)


def test_status_does_not_count_time_in_which_nobody_could_be_heard_for_ever() -> None:
    def silence_s() -> float:
        workers: Any = describe(driver.fleet, driver.now_s)["workers"]
        return max(float(worker["silent_s"]) for worker in workers)

    driver = on_machines("ab")
    train(driver, 3)
    driver.wait(40, hidden=ALL)
    assert silence_s() == pytest.approx(40, abs=4)
    train(driver, 3)
    assert silence_s() < 2
