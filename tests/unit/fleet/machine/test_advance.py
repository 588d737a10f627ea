from itertools import pairwise
from typing import Any

import pytest

from tests.unit.fleet.machine.rollbacks import abandoned_timeline, spare_of_a_rollback
from tests.unit.fleet.support import Driver, make_job, make_plan, sends, two_stages
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.errors import NoPlanError
from varuna.core.messages import (
    Apply,
    Assign,
    Failed,
    Finish,
    Hold,
    RaiseFlag,
    Recorded,
    StopReport,
    Suspect,
    TrainingOver,
    Unsaved,
    Voted,
)
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.fleet.machine.advance import advance
from varuna.fleet.page.status import describe
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import ConnectionLost, FinishRequested, SpawnRequested, StopRequested, Tick
from varuna.fleet.state.outputs import Complain, Instruction, Kill, Publish, Send, Spawn
from varuna.fleet.state.phases import Ended, Running
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import (
    GenerationStarted,
    Morphed,
    Notice,
    RunEnded,
    StepRecorded,
    WorkerLost,
)


def running(workers: int = 4, *, steps: tuple[int, ...] = (0, 1), **options: object) -> Driver:
    """A run of which some steps are recorded: 2 stages, the rest replicas."""
    config = FleetConfig(workers=workers, **options)  # type: ignore[arg-type]
    driver = Driver(config, plan=two_stages)
    driver.begin(*steps)
    return driver


def kinds(instructions: list[Instruction]) -> list[str]:
    return [
        type(item.event).__name__
        if isinstance(item, Publish)
        else type(item.message).__name__
        if isinstance(item, Send)
        else type(item).__name__
        for item in instructions
    ]


# -- start -------------------------------------------------------------------------------------------


def test_workers_are_spawned_at_once_and_once() -> None:
    driver = Driver(FleetConfig(workers=3))
    assert driver.done == [Spawn(3)]
    assert not any(isinstance(item, Spawn) for item in driver.wait(5))


def test_a_shard_that_cannot_be_written_is_passed_on_and_ends_nothing() -> None:
    driver = Driver(FleetConfig(workers=2))
    driver.gather()
    assert driver.say("w1", Unsaved(reason="no space")) == [Complain("w1", "no space")]
    driver.voted(0)
    assert driver.fleet.recorded.step == 0


def test_the_first_generation_waits_for_all_launched_workers() -> None:
    driver = Driver(FleetConfig(workers=2))
    assert not sends(driver.hello("w0"), Assign)
    assigns = sends(driver.hello("w1"), Assign)
    assert [(worker, message.assignment.rank) for worker, message in assigns] == [("w0", 0), ("w1", 1)]
    assert all(message.assignment.fresh and message.assignment.next_step == 0 for _, message in assigns)


def test_the_first_generation_starts_without_those_that_do_not_come() -> None:
    driver = Driver(FleetConfig(workers=2, gather_s=10))
    driver.hello("w0")
    assert not sends(driver.wait(9), Assign)
    assert len(sends(driver.wait(2), Assign)) == 1


def test_a_generation_is_on_disk_before_anybody_is_told() -> None:
    driver = Driver(FleetConfig(workers=2))
    driver.hello("w0")
    assert kinds(driver.hello("w1")) == ["WorkerJoined", "GenerationStarted", "Assign", "Assign"]


def test_a_run_resumes_from_its_newest_checkpoint_with_its_micro_batch() -> None:
    driver = Driver(FleetConfig(workers=2), checkpoint=Checkpoint("ck/step-7", 7, 8))
    driver.gather()
    assignment = driver.assignments["w1"]
    assert (assignment.checkpoint, assignment.next_step, assignment.fresh) == ("ck/step-7", 7, False)
    assert assignment.plan.micro_batch == 8
    assert not any(notice.warning for notice in driver.told(Notice))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"seed": 7}, "its job.seed is 7, but the run's is 0"),
        ({"torch": "2.12.1"}, "it has torch 2.12.1, but the run 2.13.0: other versions round differently"),
        ({"first_samples": "7f"}, "its dataset has other samples than the run's. Give all workers the same data"),
    ],
)
def test_a_worker_with_another_job_torch_or_data_is_refused_and_not_replaced(other: dict[str, Any], why: str) -> None:
    job = make_job().model_copy(update={"torch": "2.13.0", "first_samples": "2a"})
    driver = Driver(FleetConfig(workers=2), job=job)
    driver.hello("w0")
    [(worker, finish)] = sends(driver.hello("w1", **other), Finish)[:1]
    assert worker == "w1"
    assert f"was refused: {why}" in (finish.failure or "")
    assert sends(driver.done, Assign)
    assert not any(isinstance(item, Spawn) for item in driver.wait(20))


def test_ranks_beyond_the_grid_are_spares() -> None:
    driver = running(5)
    assert [driver.assignments[f"w{n}"].is_spare for n in range(5)] == [False] * 4 + [True]


# -- steps -------------------------------------------------------------------------------------------


def test_a_step_is_recorded_once_and_workers_are_told() -> None:
    driver = running(2, steps=())
    vote = driver.vote(0)
    assert kinds(driver.say("w0", Voted(vote=vote))) == ["StepRecorded", "Recorded", "Recorded"]
    assert driver.say("w0", Voted(vote=vote)) == []
    assert driver.told(StepRecorded)[0].examples_per_s == 32.0


def test_a_vote_of_an_old_generation_is_ignored() -> None:
    driver = running(4)
    old = driver.vote(2)
    driver.kill("w3")
    driver.all_held(2)
    assert driver.fleet.generation == 1
    assert driver.say("w0", Voted(vote=old)) == []


def test_a_vote_of_the_wrong_length_ends_the_run() -> None:
    driver = running(2)
    vote = driver.vote(2)
    driver.say("w0", Voted(vote=vote.model_copy(update={"vector": vote.vector[:-1]})))
    assert driver.end is not None
    assert "cannot be read" in driver.end.text


# -- loss --------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_the_step_in_flight_is_retried() -> None:
    driver = running(4)
    instructions = driver.kill("w3")
    assert [worker for worker, _ in sends(instructions, Hold)] == ["w0", "w1", "w2"]
    assert instructions[-1] == Spawn(1)
    driver.now_s += 1
    driver.all_held(2)
    record = driver.fleet.record
    assert (record.cause, record.first_step, record.steps_redone) == ("worker w3 killed by SIGKILL", 2, 1)
    assert not record.rollback
    driver.now_s += 1
    driver.voted(2)
    [morphed] = driver.told(Morphed)
    assert morphed.record.recovery_seconds == pytest.approx(2.0)
    assert morphed.old_plan.replicas == 2


def test_a_spare_takes_a_lost_seat_with_a_copy_of_its_sections() -> None:
    driver = running(5, replace=False)
    driver.kill("w3")
    driver.all_held(2)
    assignment = driver.assignments["w4"]
    assert assignment.rank == 3
    assert [(move.section, move.source_rank, move.target_rank) for move in assignment.transfers] == [
        (2, 1, 3),
        (3, 1, 3),
    ]
    assert driver.fleet.record.moved_sections == 2


def test_a_spare_that_takes_a_seat_one_step_behind_is_given_state_and_not_the_vote() -> None:
    """It has the parameters from before that step, but took no part in it: it has no gradients to apply."""
    driver = Driver(FleetConfig(workers=6, replace=False), plan=two_stages)
    driver.begin(0, 1)
    driver.kill("w5")
    driver.all_held(2)
    driver.voted(2)
    driver.kill("w0")
    for name, next_step in (("w1", 3), ("w2", 3), ("w3", 3), ("w4", None)):
        driver.held(name, next_step)
    assert "w4" in driver.fleet.record.grid
    driver.kill("w2")
    done = len(driver.done)
    for name in ("w1", "w3"):
        driver.held(name, 3)
    driver.say("w4", StopReport(generation=2, next_step=2, sections=(0, 1)))  # its state has not come yet
    assert not sends(driver.done[done:], Apply)


def test_a_lost_spare_is_no_reason_to_morph_once_the_generation_trains() -> None:
    driver = running(5)
    assert kinds(driver.kill("w4")) == ["WorkerLost", "Spawn"]
    assert isinstance(driver.fleet.phase, Running)


def test_a_lost_spare_ends_a_generation_that_still_forms() -> None:
    driver = running(5, steps=())
    assert len(sends(driver.kill("w4"), Hold)) == 4


def test_a_frozen_worker_is_killed_when_its_lease_ends() -> None:
    driver = running(2)
    driver.wait(6.5, silent=("w1",))
    assert any(isinstance(item, Kill) and item.worker == "w1" for item in driver.done)
    assert "w1 froze (no heartbeat for 6." in driver.told(WorkerLost)[0].cause


def test_a_manager_that_stood_still_evicts_nobody() -> None:
    driver = running(2)
    driver.now_s += 60
    driver.wait(0.2)
    assert driver.told(WorkerLost) == []


def test_a_manager_that_heard_nobody_evicts_nobody_until_a_lease_of_hearing_has_passed() -> None:
    """Its own thread ticks on while the server's event loop stands still."""
    driver = running(2)
    for _ in range(100):
        driver.now_s += 0.2
        driver.feed(Tick(deaf_s=0.2))
    assert driver.told(WorkerLost) == []
    driver.wait(6.5, silent=("w1",))
    assert [event.worker for event in driver.told(WorkerLost)] == ["w1"]


def test_a_closed_connection_is_a_loss_when_the_process_lives_on() -> None:
    driver = running(2, replace=False)
    driver.feed(ConnectionLost("w1"))
    assert driver.told(WorkerLost) == []
    driver.wait(1.2)
    assert driver.told(WorkerLost)[0].cause == "worker w1 closed its connection"


def test_who_does_not_answer_a_hold_is_killed() -> None:
    driver = running(4, hold_timeout_s=3, replace=False)
    driver.kill("w3")
    driver.held("w0", 2)
    driver.held("w1", 2)
    driver.wait(3.2)
    assert driver.told(WorkerLost)[-1].cause == "worker w2 did not stop within 3 s"
    assert driver.fleet.record.members == ("w0", "w1")


def test_evidence_alone_ends_a_generation_after_a_grace() -> None:
    driver = running(2)
    driver.say("w0", Suspect(generation=0, reason="link to rank 1 broke"))
    assert not sends(driver.wait(0.8), Hold)
    assert len(sends(driver.wait(0.4), Hold)) == 2


def test_evidence_shortens_the_lease_of_silent_workers() -> None:
    driver = running(2, replace=False)
    driver.wait(1.0, silent=("w1",))
    driver.say("w0", Suspect(generation=0, reason="link to rank 1 broke"))
    driver.wait(0.8, silent=("w1",))
    assert "w1 froze" in driver.told(WorkerLost)[0].cause


# -- rollback ----------------------------------------------------------------------------------------


def test_lost_state_comes_back_from_the_newest_checkpoint_on_every_worker() -> None:
    driver = running(2, steps=(0, 1, 2, 3))
    driver.checkpoint = Checkpoint("ck/step-2", 2, 2)
    driver.kill("w1")
    driver.held("w0", 4)
    assert driver.fleet.generation == 0  # waits for the replacement
    driver.hello("w2")
    record = driver.fleet.record
    assert (record.rollback, record.first_step, record.steps_redone) == (True, 2, 3)
    assert {a.checkpoint for w, a in driver.assignments.items() if w != "w1"} == {"ck/step-2"}
    assert any(notice.warning and "ROLLBACK" in notice.text for notice in driver.told(Notice))
    driver.voted(2, 3)
    assert [(e.step, e.generation) for e in driver.told(StepRecorded)][-3:] == [(3, 0), (2, 1), (3, 1)]


def test_without_a_checkpoint_a_rollback_starts_afresh() -> None:
    driver = running(2, replace=False)
    driver.plan = make_plan
    driver.kill("w1")
    driver.held("w0", 2)
    assert driver.assignments["w0"].fresh
    assert driver.fleet.record.first_step == 0


def test_state_and_votes_of_an_abandoned_timeline_do_not_count() -> None:
    abandoned_timeline(advance)


def test_a_spare_of_a_rollback_is_no_source_whatever_it_says() -> None:
    spare_of_a_rollback(advance)


# -- gain --------------------------------------------------------------------------------------------


def test_a_newcomer_that_makes_steps_faster_is_taken_in_behind_a_vote() -> None:
    driver = running(4, steps=(0,))
    driver.kill("w3")
    driver.all_held(1)
    driver.voted(1)
    driver.hello("w4")
    [(worker, pause)] = sends(driver.wait(1.2), RaiseFlag)
    assert (worker, pause.generation) == (driver.fleet.members[0], 1)
    driver.voted(2)
    grid, spares = driver.fleet.record.grid, set(driver.fleet.members) - set(driver.fleet.record.grid)
    for name in driver.fleet.members:
        told = sends(driver.held(name, 3 if name in grid else None), Hold)
        assert {worker for worker, _ in told} == (spares if name == grid[0] else set())
    record = driver.fleet.record
    assert (record.cause, record.steps_redone, record.first_step) == ("worker w4 joined", 0, 3)
    assert record.plan.workers == 4


def test_a_newcomer_that_does_not_help_waits_as_spare() -> None:
    driver = running(4)
    driver.feed(SpawnRequested(1))
    driver.hello("w4")
    assert not sends(driver.wait(2), RaiseFlag)
    assert "joined as spare" in driver.told(Notice)[-1].text


def test_newcomers_within_a_second_are_taken_together() -> None:
    driver = running(4)
    driver.feed(SpawnRequested(2))
    driver.hello("w4")
    driver.wait(0.8)
    driver.hello("w5")
    assert len(sends(driver.wait(2), RaiseFlag)) == 1
    for name in driver.fleet.members:
        driver.held(name, 2)
    assert driver.fleet.record.cause == "workers w4 and w5 joined"


# -- no plan -----------------------------------------------------------------------------------------


def test_without_a_plan_the_run_waits_for_the_replacement() -> None:
    driver = running(2)
    driver.kill("w0")
    driver.held("w1", 2)
    driver.wait(1.2)
    assert "waiting for starting workers" in driver.told(Notice)[-1].text
    driver.hello("w2")
    assert driver.fleet.generation == 1


def test_without_a_plan_and_without_more_workers_the_run_ends_with_the_planners_words() -> None:
    driver = Driver(FleetConfig(workers=1), plan=two_stages)
    driver.gather()
    assert driver.end == Ended(3, "2 stages need 2 workers, 1 are there")


def test_the_micro_batch_is_kept_and_lowered_only_if_nothing_else_fits() -> None:
    asked: list[int | None] = []

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        asked.append(micro_batch)
        if size_of(workers) == 2 and micro_batch == 4:
            raise NoPlanError("too big")
        return make_plan(job, workers, micro_batch or (4 if size_of(workers) > 2 else 1), stages=1)

    driver = Driver(FleetConfig(workers=3, replace=False), plan=plan)
    driver.begin(0)
    driver.kill("w2")
    driver.all_held(1)
    assert asked == [None, 4, None]
    assert driver.fleet.record.plan.micro_batch == 1
    assert "no plan fits with micro-batches of 4" in driver.told(Notice)[-1].text


# -- ends --------------------------------------------------------------------------------------------


def test_the_run_ends_well_when_all_have_left_and_their_processes_are_gone() -> None:
    driver = running(3)
    driver.leave("w0")
    assert [worker for worker, _ in sends(driver.done, TrainingOver)] == []
    driver.leave("w1")
    assert [worker for worker, _ in sends(driver.done, TrainingOver)] == ["w2"]
    driver.kill("w1", code=0)
    driver.wait(60)
    assert driver.end is None  # rank 0's script may take its time
    driver.kill("w0", code=0)
    driver.wait(1.2)
    assert driver.end == Ended(0, "2 steps done")


@pytest.mark.parametrize("replace", [True, False])
def test_nobody_is_started_in_place_of_one_whose_script_is_over_while_others_still_run(replace: bool) -> None:
    driver = running(4, replace=replace)
    driver.leave("w1", "w2")
    driver.kill("w1", code=0)
    driver.kill("w2", code=0)
    driver.wait(1.2)
    assert set(driver.fleet.workers) == {"w0", "w3"}
    assert (driver.fleet.starts.spawned, driver.fleet.starts.spawning) == (4, 0)
    driver.leave("w0", "w3")
    driver.kill("w3", code=0)
    driver.kill("w0", code=0)
    driver.wait(1.2)
    assert driver.end == Ended(0, "2 steps done")


def test_once_rank_0_is_gone_the_others_are_bounded() -> None:
    driver = running(2)
    driver.leave("w0", "w1")
    driver.kill("w0", code=0)
    driver.wait(20)
    assert driver.end is None
    driver.wait(20)
    assert driver.end is not None
    assert driver.end.exit_code == 0


def test_a_death_after_somebody_left_is_no_reason_to_morph() -> None:
    driver = running(2)
    driver.leave("w0")
    driver.kill("w1")
    driver.feed(ConnectionLost("w0"))
    driver.kill("w0", code=0)
    assert driver.end == Ended(0, "2 steps done")
    assert len(driver.told(GenerationStarted)) == 1


def test_who_is_stuck_while_others_have_left_applies_the_last_step_and_is_dismissed() -> None:
    driver = running(4)
    vote = driver.vote(2)
    driver.leave("w1", "w2")
    driver.kill("w0")
    assert [worker for worker, _ in sends(driver.done, Hold)] == ["w3"]
    told = driver.held("w3", 2, votes=(vote,))
    assert kinds(told) == ["StepRecorded", "Recorded", "VerdictReached", "Apply"]
    assert [worker for worker, _ in sends(driver.held("w3", 3), TrainingOver)] == ["w3"]
    assert driver.told(StepRecorded)[-1].step == 2


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_rank_whose_link_broke_before_it_had_the_last_vote_applies_it_too(leaves_first: bool) -> None:
    driver = running(2)
    driver.voted(2)  # rank 0 has the result of the last vote, and rank 1 has not
    if leaves_first:
        driver.leave("w0")
    driver.say("w1", Suspect(generation=0, reason="link to rank 0 broke"))
    if not leaves_first:
        driver.leave("w0")
    driver.wait(1.2)
    assert [worker for worker, _ in sends(driver.held("w1", 2), Apply)] == ["w1"]
    assert not sends(driver.done, TrainingOver)
    driver.held("w1", 3)
    assert [worker for worker, _ in sends(driver.done, TrainingOver)] == ["w1"]
    driver.kill("w0", code=0)
    driver.wait(5)
    assert driver.end is None  # rank 1 saves its part
    driver.kill("w1", code=0)
    driver.wait(1.2)
    assert driver.end == Ended(0, "3 steps done")


def test_who_never_applies_the_last_step_is_lost() -> None:
    driver = running(2, hold_timeout_s=5, replace=False)
    driver.voted(2)
    driver.leave("w0")
    driver.say("w1", Suspect(generation=0, reason="link to rank 0 broke"))
    driver.wait(1.2)
    driver.held("w1", 2)
    driver.wait(6)
    assert driver.told(WorkerLost)[0].cause == "worker w1 did not apply the last step within 5 s"
    driver.kill("w0", code=0)
    driver.wait(1.2)
    assert driver.end is not None


def test_a_workers_own_exception_ends_the_run_with_its_traceback() -> None:
    driver = running(2)
    driver.say("w1", Failed(summary="ValueError: boom", traceback="Traceback ...\nValueError: boom\n", exit_code=2))
    assert driver.end == Ended(
        2, "worker w1 (rank 1, generation 0) failed: ValueError: boom\nTraceback ...\nValueError: boom"
    )
    assert [worker for worker, _ in sends(driver.done, Finish)] == ["w0"]
    assert driver.kill("w0") == []


def test_an_exit_without_a_word_is_a_failure_too() -> None:
    driver = Driver(FleetConfig(workers=2))
    driver.kill("w0", code=1, stderr="NameError: x\n")
    driver.wait(1.2)
    assert driver.end is not None
    assert driver.end.exit_code == 1
    assert driver.end.text.endswith("stderr:\nNameError: x")


def test_last_words_that_arrive_after_the_exit_are_heard() -> None:
    driver = running(2)
    driver.kill("w1", code=1)
    driver.say("w1", Failed(summary="boom", traceback="T"))
    assert driver.end is not None
    assert "failed: boom" in driver.end.text


def test_replacements_that_die_at_once_come_slower_and_slower_and_end_the_run() -> None:
    driver = running(2)
    spawned_s = []
    worker = 1
    while driver.end is None:
        driver.kill(f"w{worker}")
        before = driver.names
        while driver.names == before and driver.end is None:
            driver.wait(0.2)
        spawned_s.append(driver.now_s)
        worker = driver.names - 1
    gaps = [round(b - a) for a, b in pairwise(spawned_s)]
    assert gaps[:4] == [1, 2, 4, 8]
    assert "5 replacements in a row died" in driver.end.text


def test_losing_everybody_ends_the_run_if_nobody_comes() -> None:
    driver = running(2, replace=False)
    driver.kill("w0")
    driver.kill("w1")
    assert driver.end is not None
    assert driver.end.text.startswith("there are no workers left (worker w0 killed by SIGKILL")


def test_workers_that_warm_up_are_not_called_none() -> None:
    driver = running(2)
    driver.kill("w0")
    driver.kill("w1")
    assert describe(driver.fleet, driver.now_s)["state"] == "morphing: no worker is ready yet"


def test_a_worker_can_be_asked_for_by_hand() -> None:
    driver = running(2, replace=False)
    assert driver.feed(SpawnRequested(1)) == [Spawn(1)]


def test_a_stop_request_ends_the_run() -> None:
    driver = running(2)
    assert kinds(driver.feed(StopRequested("stopped by SIGTERM", 143))) == ["Finish", "Finish", "RunEnded"]


def test_messages_of_the_lost_are_not_heard() -> None:
    driver = running(4)
    vote = driver.vote(2)
    driver.kill("w0")
    assert driver.say("w0", Voted(vote=vote)) == []


def test_everybody_told_to_record_is_alive() -> None:
    driver = running(4, steps=(0,))
    assert {worker for worker, _ in sends(driver.done, Recorded)} == {"w0", "w1", "w2", "w3"}


def test_a_job_without_steps_left_ends_well() -> None:
    driver = Driver(FleetConfig(workers=2), job=make_job(steps=0), plan=two_stages)
    driver.gather()
    driver.leave("w0", "w1")
    driver.kill("w0", code=0)
    driver.kill("w1", code=0)
    driver.wait(1.2)
    assert driver.end == Ended(0, "0 steps done")


def test_a_wish_to_finish_needs_no_words() -> None:
    driver = running(2)
    driver.voted(0)
    said = driver.feed(FinishRequested(""))
    assert [message.flag for _, message in sends(said, RaiseFlag)] == ["stop"]


@pytest.mark.parametrize(("steps", "why"), [(2, ": the money is gone"), (100, "")])
def test_a_run_that_ended_before_its_last_step_says_why(steps: int, why: str) -> None:
    driver = running(2)
    for step in range(steps):
        driver.voted(step)
    driver.feed(FinishRequested("the money is gone"))
    driver.leave("w0", "w1")
    for name in ("w0", "w1"):
        driver.kill(name, code=0)
    driver.wait(1.2)
    assert driver.end == Ended(0, f"{steps} steps done{why}")


def test_the_worker_whose_failure_ends_a_run_is_named_apart_from_the_sentence() -> None:
    driver = running(2)
    driver.say("w1", Failed(summary="boom", traceback="T"))
    [ended] = driver.told(RunEnded)
    assert ended.worker == "w1"
    assert [message.failure for _, message in sends(driver.done, Finish)] == [ended.text.splitlines()[0]]
