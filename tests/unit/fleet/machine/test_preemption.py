"""Planned losses: notices, drains, people who ask."""

from dataclasses import replace

import pytest

from tests.unit.fleet.support import Driver, make_job, make_plan, preempted, sends, two_stages
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.messages import Finish, Hold, RaiseFlag, WorkerPhase
from varuna.core.model import JobFacts
from varuna.core.node_notices import Preemptible, RebalanceAdvice
from varuna.core.plan import Plan
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    DrainRequested,
    FinishRequested,
    MorphRequested,
    NoticeReceived,
    SpawnRequested,
    WorkerSpawned,
)
from varuna.fleet.state.loss_rate import SPOT_PER_HOUR
from varuna.fleet.state.outputs import Release, Spawn
from varuna.fleet.state.phases import Ended, Idle, Running, Stopping
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import Notice, WorkerLeft, WorkerLost
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.stutter import Straggler


def on_nodes(nodes: str, *, steps: tuple[int, ...] = (0, 1), **options: object) -> Driver:
    """A run with a worker on each node named: ``"aab"`` is two on a and one on b."""
    driver = Driver(FleetConfig(workers=len(nodes), **options), plan=two_stages, spawns=False)  # type: ignore[arg-type]
    for number, node in enumerate(nodes):
        driver.feed(WorkerSpawned(f"w{number}", node))
        driver.names += 1
    driver.begin(*steps)
    return driver


def flags(driver: Driver) -> list[str]:
    return [message.flag for _, message in sends(driver.done, RaiseFlag)]


def regroup(driver: Driver, next_step: int) -> None:
    """All members stop after the vote that carried the flag."""
    driver.voted(next_step - 1)
    driver.all_held(next_step)


def test_a_notice_leads_to_a_morph_behind_a_vote_with_the_leaving_node_as_a_source() -> None:
    driver = on_nodes("abcde", replace=False)
    driver.feed(preempted("b", in_s=15 - driver.now_s))
    assert flags(driver) == ["regroup"]
    assert not sends(driver.done, Hold)
    regroup(driver, 3)
    record = driver.fleet.record
    assert record.cause == "node b will leave (preemption notice)"
    assert (record.steps_redone, record.first_step, record.rollback) == (0, 3, False)
    assert record.members == ("w0", "w4", "w2", "w3", "w1")  # the spare took the seat; the leaver only serves
    assert not any(isinstance(item, Release) for item in driver.done)
    driver.voted(3)
    driver.wait(0.2)
    assert [worker for worker, _ in sends(driver.done, Finish)] == ["w1"]
    assert [item for item in driver.done if isinstance(item, Release)] == [Release("b", drained=False)]
    driver.kill("w1", code=0)
    driver.wait(2)
    assert driver.told(WorkerLost) == []
    assert isinstance(driver.fleet.phase, Running)


def test_a_node_keeps_its_seat_until_shortly_before_its_deadline() -> None:
    driver = on_nodes("abcde", replace=False)
    driver.feed(preempted("b", in_s=120 - driver.now_s))
    driver.wait(100)
    assert flags(driver) == []
    driver.wait(5)
    assert flags(driver) == ["regroup"]


def test_the_last_holder_of_a_section_hands_it_over_before_it_goes() -> None:
    driver = on_nodes("abc", replace=False)
    driver.feed(preempted("b", in_s=15 - driver.now_s))
    regroup(driver, 3)
    moves = driver.assignments["w2"].transfers
    assert {(move.section, move.source_rank, move.target_rank) for move in moves} == {(2, 2, 1), (3, 2, 1)}
    assert not driver.fleet.record.rollback


def test_a_straggler_that_was_left_out_takes_over_rather_than_nobody() -> None:
    driver = on_nodes("abc", replace=False)
    spare = next(name for name in driver.fleet.joined if not driver.fleet.workers[name].seated)
    driver.fleet = replace(driver.fleet, speeds=Speeds(slow={spare: Straggler(2.4, until_s=300.0)}))
    driver.feed(preempted("b", in_s=15 - driver.now_s))
    assert flags(driver) == ["regroup"]
    regroup(driver, 3)
    assert spare in driver.fleet.record.grid
    assert not driver.fleet.record.rollback


def test_a_checkpoint_is_asked_for_where_a_section_would_lose_its_last_holder() -> None:
    driver = on_nodes("ab", replace=False)
    driver.fleet = with_checkpoints(driver)
    driver.feed(preempted("b", in_s=15 - driver.now_s))
    assert flags(driver) == ["checkpoint"]  # nobody could take over: training goes on as long as it can
    driver.feed(SpawnRequested(1))
    driver.feed(WorkerSpawned("w2", "c"))
    driver.hello("w2", checkpoint_dir="ck")
    driver.wait(0.2)
    assert flags(driver) == ["checkpoint", "regroup"]


def with_checkpoints(driver: Driver) -> Fleet:
    assert driver.fleet.job is not None
    job = driver.fleet.job.model_copy(update={"checkpoint_dir": "ck"})
    return replace(driver.fleet, script=replace(driver.fleet.script, job=job))


def test_a_step_too_long_for_the_deadline_is_broken_off() -> None:
    driver = on_nodes("abcd", replace=False)
    driver.fleet = long_steps(driver, 300.0)
    driver.feed(preempted("d", in_s=30 - driver.now_s))
    assert len(sends(driver.done, Hold)) == 4  # the leaver too: its state is copied away
    driver.all_held(2)
    record = driver.fleet.record
    assert (record.first_step, record.steps_redone, record.plan.workers) == (2, 1, 2)


def long_steps(driver: Driver, wall_s: float) -> Fleet:
    return replace(driver.fleet, recorded=replace(driver.fleet.recorded, wall_s=wall_s))


def test_a_replacement_is_asked_for_when_the_notice_comes() -> None:
    driver = on_nodes("abcd")
    instructions = driver.feed(preempted("d", in_s=15 - driver.now_s))
    assert Spawn(1) in instructions
    assert not any(isinstance(item, Spawn) for item in driver.wait(5))


def test_a_drained_node_without_a_seat_goes_at_once() -> None:
    driver = on_nodes("abcde")
    driver.feed(DrainRequested("e"))
    assert [worker for worker, _ in sends(driver.done, Finish)] == ["w4"]
    assert Release("e", drained=True) in driver.done
    assert driver.fleet.generation == 0


@pytest.mark.parametrize("code", [0, -15])
def test_a_worker_that_was_sent_home_leaves_and_is_not_lost(code: int) -> None:
    driver = on_nodes("abcde")
    driver.feed(DrainRequested("e"))
    driver.kill("w4", code)
    driver.wait(3.0)
    assert driver.told(WorkerLeft) == [WorkerLeft(worker="w4")]
    assert driver.told(WorkerLost) == []


def test_a_worker_that_comes_from_a_leaving_node_is_sent_home() -> None:
    driver = on_nodes("abcde")
    driver.feed(preempted("f", in_s=1000 - driver.now_s))
    driver.feed(WorkerSpawned("w5", "f"))
    driver.hello("w5")
    assert [worker for worker, _ in sends(driver.done, Finish)] == ["w5"]


def advised(nodes: str) -> Driver:
    """A run over machines, of which the first two workers' are said to be at risk."""
    driver = on_nodes(nodes, replace=False, elastic=True)
    driver.feed(NoticeReceived(nodes[1], RebalanceAdvice(reason="AWS recommends to rebalance")))
    return driver


def test_a_run_on_spot_machines_plans_for_losses_before_it_has_seen_any() -> None:
    driver = Driver(FleetConfig(workers=2), plan=two_stages, spawns=False)
    for number, node in enumerate("ab"):
        driver.feed(NoticeReceived(node, Preemptible()))
        driver.feed(WorkerSpawned(f"w{number}", node))
        driver.names += 1
    driver.gather()
    assert driver.fleet.record.losses_per_hour == SPOT_PER_HOUR
    assert len([notice for notice in driver.told(Notice) if "says its cloud" in notice.text]) == 1


def test_a_node_at_risk_keeps_its_seat_until_a_spare_on_another_node_is_there() -> None:
    driver = advised("abcd")
    driver.wait(5)
    assert flags(driver) == []  # nobody could take over, and nobody has taken it away
    driver.feed(WorkerSpawned("w4", "e"))
    driver.hello("w4")
    driver.wait(1)
    assert flags(driver) == ["regroup"]
    regroup(driver, 3)
    record = driver.fleet.record
    assert record.cause == "node b may be taken away soon (AWS recommends to rebalance); spares take its place"
    assert (record.grid, record.steps_redone, record.rollback) == (("w0", "w4", "w2", "w3"), 0, False)
    assert not any(isinstance(item, Release) for item in driver.done)  # it stays, as a spare
    driver.voted(3)
    driver.wait(30)
    assert flags(driver) == ["regroup"]


def test_a_node_at_risk_is_a_spare_after_any_morph_and_a_rank_if_nobody_else_is_there() -> None:
    driver = advised("abcde")
    regroup(driver, 3)
    assert driver.fleet.record.grid == ("w0", "w4", "w2", "w3")
    driver.voted(3)
    driver.kill("w4")
    for name in ("w0", "w1", "w2", "w3"):
        driver.held(name, 4 if name != "w1" else None)
    assert "w1" in driver.fleet.record.grid


def test_a_node_that_outlives_its_deadline_is_welcome_again() -> None:
    driver = on_nodes("ab", replace=False)
    driver.feed(preempted("b", in_s=10 - driver.now_s))
    assert "b" in driver.fleet.machines.departing
    driver.wait(75)
    assert not driver.fleet.machines.departing


def test_the_planner_is_not_asked_at_every_tick() -> None:
    asked = []

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        asked.append(size_of(workers))
        return two_stages(job, workers, micro_batch)

    driver = on_nodes("ab", replace=False)
    driver.plan = plan
    driver.feed(DrainRequested("b"))
    driver.wait(10)
    assert asked == [1, 1]  # with the micro-batch of the run, then with any


def test_all_nodes_leaving_keep_training_until_they_are_gone() -> None:
    driver = on_nodes("ab")
    for node in "ab":
        driver.feed(preempted(node, in_s=100 - driver.now_s))
    driver.wait(1)
    assert isinstance(driver.fleet.phase, Running)
    assert flags(driver) == []  # no checkpoint directory, nobody to take over
    driver.voted(2)
    assert driver.fleet.recorded.step == 2


def test_the_leaver_that_dies_while_its_state_is_copied_ends_the_morph_and_not_the_run() -> None:
    driver = on_nodes("abcde", replace=False)
    driver.feed(preempted("b", in_s=15 - driver.now_s))
    regroup(driver, 3)
    driver.kill("w1")
    driver.all_held(3)
    assert (driver.fleet.generation, driver.fleet.record.first_step, driver.fleet.record.rollback) == (2, 3, False)


def test_an_asked_morph_happens_only_if_it_changes_something() -> None:
    driver = on_nodes("abcd", replace=False)
    driver.feed(MorphRequested())
    assert flags(driver) == []
    assert "is the best plan for 4 workers" in driver.told(Notice)[-1].text
    driver.plan = make_plan
    driver.feed(MorphRequested())
    assert flags(driver) == ["regroup"]
    regroup(driver, 3)
    assert (driver.fleet.record.plan.stages, driver.fleet.record.cause) == (4, "a morph was requested")


def test_a_run_that_is_asked_to_finish_stops_behind_a_vote() -> None:
    driver = on_nodes("ab")
    driver.feed(FinishRequested("varuna stop"))
    assert flags(driver) == ["stop"]
    driver.voted(2)
    driver.leave("w0", "w1")
    driver.kill("w0", code=0)
    driver.kill("w1", code=0)
    driver.wait(1.2)
    assert isinstance(driver.fleet.phase, Ended)
    assert driver.end is not None
    assert driver.end.exit_code == 0


def test_a_loss_on_the_way_to_the_end_does_not_forget_that_it_was_asked_for() -> None:
    driver = on_nodes("abcd", replace=False)
    driver.feed(FinishRequested("varuna stop"))
    driver.kill("w3")
    driver.all_held(2)
    assert [message.generation for _, message in sends(driver.done, RaiseFlag) if message.flag == "stop"] == [0, 1]


def test_losing_everybody_waits_for_replacements_and_goes_on_from_the_checkpoint() -> None:
    driver = Driver(FleetConfig(workers=2), plan=two_stages, job=make_job())
    driver.begin(0, 1, 2)
    driver.checkpoint = Checkpoint("ck/step-2", 2, 2)
    driver.kill("w0")
    driver.kill("w1")
    assert isinstance(driver.fleet.phase, Idle)
    driver.wait(60)
    driver.hello("w2")
    driver.wait(60)
    driver.hello("w3")
    record = driver.fleet.record
    assert (record.rollback, record.first_step, record.checkpoint) == (True, 2, "ck/step-2")
    assert driver.end is None


def test_a_joiner_that_cannot_copy_is_dropped() -> None:
    driver = on_nodes("abcd", replace=False, form_timeout_s=5, min_gain=0.0)
    driver.feed(SpawnRequested(2))
    for name, node in (("w4", "e"), ("w5", "f")):
        driver.feed(WorkerSpawned(name, node))
        driver.hello(name)
    driver.wait(1.2)
    regroup(driver, 3)
    assert driver.fleet.record.plan.replicas == 3
    for _ in range(3):
        driver.wait(5.2, phase=WorkerPhase.FORMS)
        for name in driver.fleet.live_members:
            driver.held(name, 3 if name in ("w0", "w1", "w2", "w3") else None)
    assert [lost.worker for lost in driver.told(WorkerLost)] == ["w4", "w5"]
    assert all("could not copy its state" in lost.cause for lost in driver.told(WorkerLost))
    assert driver.fleet.record.grid == ("w0", "w1", "w2", "w3")
    driver.voted(3)
    assert driver.fleet.recorded.step == 3


def test_nobody_is_dropped_while_a_worker_builds_the_model() -> None:
    driver = Driver(FleetConfig(workers=2, form_timeout_s=5), plan=two_stages)
    driver.gather()
    driver.wait(20, phase=WorkerPhase.FORMS, at_work=("w1",))
    assert driver.fleet.generation == 0
    assert not driver.told(WorkerLost)
    driver.wait(0.4, phase=WorkerPhase.FORMS)
    assert isinstance(driver.fleet.phase, Stopping)
