"""Trainings of a script, one after another, as the state machine sees them."""

import pytest

from tests.unit.fleet.support import Driver, make_job, sends, two_stages
from varuna.core.messages import Assign, Beat, Failed, Finish, Leaving, Saved, StopReport, TrainingOver, Voted
from varuna.core.model import JobFacts
from varuna.core.saved import SavedShard
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import ConnectionLost, DrainRequested, FinishRequested, WorkerSpawned
from varuna.fleet.state.outputs import Collect
from varuna.fleet.state.phases import Ended, Finishing, Idle, Running
from varuna.fleet.state.run_events import GenerationStarted, Notice, StepRecorded, TrainingEnded, WorkerLost
from varuna.fleet.state.worker import WorkerStatus

OTHER = make_job(sections=2, steps=5)
"""Another model, with another number of steps."""


def begins(driver: Driver, worker: str, training: int, job: JobFacts | None = None) -> None:
    """A worker says Hello for a training of its script."""
    hello = driver.hello_of(worker)
    driver.say(worker, hello.model_copy(update={"training": training, "job": job or driver.job}))


def trained(workers: int = 2, **options: object) -> Driver:
    """All have left the first training, of three steps."""
    driver = Driver(FleetConfig(workers=workers, **options), plan=two_stages, job=make_job(steps=3))  # type: ignore[arg-type]
    driver.begin(0, 1, 2)
    driver.leave(*driver.fleet.members)
    assert isinstance(driver.fleet.phase, Finishing)
    return driver


def second(workers: int = 2, **options: object) -> Driver:
    """Training 2 of the script runs, of another job."""
    driver = trained(workers, **options)
    for name in list(driver.fleet.workers):
        begins(driver, name, 1, OTHER)
    assert isinstance(driver.fleet.phase, Running)
    return driver


def test_the_next_training_begins_with_its_own_job_steps_and_plan() -> None:
    driver = second()
    [ended] = driver.told(TrainingEnded)
    assert (ended.training, ended.steps, ended.job) == (0, 3, driver.job)
    record = driver.told(GenerationStarted)[-1].record
    assert (record.generation, record.training, record.began, record.first_step) == (1, 1, 1, 0)
    assert record.plan.sections == len(OTHER.model.sections)
    assert all(driver.assignments[name].fresh for name in ("w0", "w1"))
    assert (driver.fleet.training, driver.fleet.job, driver.fleet.recorded.step) == (1, OTHER, -1)
    driver.voted(0)
    assert [(event.step, event.generation) for event in driver.told(StepRecorded)[-2:]] == [(2, 0), (0, 1)]


def test_who_is_ahead_waits_until_the_last_rank_has_left() -> None:
    driver = Driver(FleetConfig(workers=2), plan=two_stages, job=make_job(steps=3))
    driver.begin(0, 1, 2)
    driver.leave("w0")
    begins(driver, "w0", 1)
    assert driver.fleet.training == 0
    driver.leave("w1")
    assert driver.fleet.training == 1
    assert isinstance(driver.fleet.phase, Idle)  # w1 is still on its way, and is waited for
    begins(driver, "w1", 1)
    assert isinstance(driver.fleet.phase, Running)
    assert len(driver.fleet.members) == 2


def test_who_takes_long_between_two_trainings_joins_the_next_one_later() -> None:
    driver = trained(4, gather_s=10)
    for name in ("w0", "w1", "w2"):
        begins(driver, name, 1)
    driver.wait(11)
    assert driver.fleet.members == ("w0", "w1", "w2")
    begins(driver, "w3", 1)
    assert driver.fleet.workers["w3"].standing is WorkerStatus.JOINED


def test_a_newcomer_is_told_that_earlier_trainings_are_over() -> None:
    driver = second()
    driver.kill("w1")
    newcomer = next(name for name in driver.fleet.workers if name not in ("w0", "w1"))
    driver.hello(newcomer)
    [(name, over)] = sends(driver.done, TrainingOver)
    assert (name, over.training, over.steps, over.is_main) == (newcomer, 0, 3, False)
    assert over.last is not None
    assert over.last.step == 2
    assert driver.fleet.workers[newcomer].standing is WorkerStatus.STARTING
    begins(driver, newcomer, 1, OTHER)
    assert driver.fleet.workers[newcomer].standing is WorkerStatus.JOINED


@pytest.mark.parametrize("training", [0, 1])
def test_a_newcomer_whose_job_differs_in_any_training_is_refused_in_words(training: int) -> None:
    driver = second()
    driver.kill("w1")
    newcomer = next(name for name in driver.fleet.workers if name not in ("w0", "w1"))
    job = OTHER if training else driver.job
    begins(driver, newcomer, training, job.model_copy(update={"optimizer": '[{"lr": 0.1}]'}))
    [(name, finish)] = sends(driver.done, Finish)
    assert name == newcomer
    assert finish.failure is not None
    assert "its optimizer has other options" in finish.failure
    assert "trainer.evaluate" in finish.failure
    assert newcomer not in driver.fleet.workers


def test_a_newcomer_that_had_no_part_in_a_training_hears_of_its_end_before_the_next_one() -> None:
    driver = Driver(FleetConfig(workers=3), plan=two_stages, job=make_job(steps=3))
    driver.begin(0, 1, 2)
    first, second, spare = driver.fleet.members
    driver.leave(first)
    begins(driver, first, 1)
    driver.leave(second)
    assert driver.fleet.training == 1
    assert [name for name, _ in sends(driver.done, TrainingOver)] == [spare]


def test_who_skips_a_training_is_refused() -> None:
    driver = Driver(FleetConfig(workers=2), plan=two_stages, job=make_job(steps=3))
    begins(driver, "w0", 0)
    begins(driver, "w1", 2)
    name, finish = sends(driver.done, Finish)[0]
    assert name == "w1"
    assert "it begins training 3 of its script, and the run is in training 1" in (finish.failure or "")


def test_a_death_between_two_trainings_costs_neither_of_them_a_step() -> None:
    driver = trained(4)
    begins(driver, "w0", 1)
    driver.kill("w3")
    for name in ("w1", "w2"):
        begins(driver, name, 1)
    assert [lost.worker for lost in driver.told(WorkerLost)] == ["w3"]
    newcomer = next(name for name in driver.fleet.workers if name not in ("w0", "w1", "w2"))
    driver.hello(newcomer)
    begins(driver, newcomer, 1)
    assert set(driver.fleet.members) == {"w0", "w1", "w2", newcomer}
    assert driver.fleet.record.first_step == 0


def test_all_die_in_the_second_training_and_newcomers_go_on_with_it() -> None:
    driver = second()
    driver.voted(0)
    driver.kill("w0")
    driver.kill("w1")
    newcomers = [name for name in driver.fleet.workers if name not in ("w0", "w1")]
    for name in newcomers:
        driver.hello(name)
        begins(driver, name, 1, OTHER)
    driver.wait(1.2)
    assert set(driver.fleet.members) == set(newcomers)
    assert driver.fleet.record.rollback
    assert driver.fleet.training == 1


def test_late_words_about_an_earlier_training_change_nothing() -> None:
    driver = trained()
    vote = driver.vote(2)
    shard = SavedShard(step=3, generation=0, section=0, file="3/0", size_bytes=1)
    for name in ("w0", "w1"):
        begins(driver, name, 1, OTHER)
    before, done = driver.fleet, len(driver.done)
    driver.say("w1", Voted(vote=vote))
    driver.say("w1", StopReport(generation=0, next_step=3, sections=(2, 3), votes=(vote,)))
    driver.say("w1", Saved(shard=shard))
    driver.say("w1", Leaving(step=3))
    assert not [each for each in driver.done[done:] if isinstance(each, Collect)]
    assert (driver.fleet.recorded.votes, driver.fleet.recorded.step, driver.fleet.phase) == ({}, -1, before.phase)


def test_a_run_that_is_asked_to_stop_begins_no_other_training() -> None:
    driver = Driver(FleetConfig(workers=2), plan=two_stages, job=make_job(steps=3))
    driver.begin(0)
    driver.feed(FinishRequested("varuna stop"))
    driver.leave("w0", "w1")
    for name in ("w0", "w1"):
        begins(driver, name, 1)
        driver.say(name, Failed(summary="varuna stop", traceback="", exit_code=1))
        driver.kill(name, code=1)
    refused = [finish.failure for _, finish in sends(driver.done, Finish)]
    assert refused == ["varuna stop; training 2 of the script does not begin"] * 2
    driver.wait(1.5)
    assert driver.end == Ended(0, "1 steps done: varuna stop")


def test_the_run_ends_when_the_script_ends_after_its_last_training() -> None:
    driver = second()
    driver.voted(*range(5))
    for name in ("w0", "w1"):
        driver.say(name, Leaving(step=5, training=1))
    for name in ("w0", "w1"):
        driver.feed(ConnectionLost(name))
        driver.kill(name, code=0)
    driver.wait(1.5)
    assert driver.end == Ended(0, "5 steps done in training 2 of the script")


def test_who_ends_where_others_begin_another_training_is_not_waited_for() -> None:
    driver = trained(4)
    for name in ("w0", "w1", "w2"):
        begins(driver, name, 1)
    driver.kill("w3", code=0)
    driver.wait(1.5)
    assert driver.fleet.members == ("w0", "w1", "w2")
    assert any("w3 ended before training 2 of its script began" in notice.text for notice in driver.told(Notice))


def test_a_worker_whose_machine_is_given_back_trains_in_no_later_training() -> None:
    driver = Driver(
        FleetConfig(workers=3, elastic=True), plan=two_stages, job=make_job(steps=3), node_of=lambda worker: worker
    )
    for number in range(3):
        driver.feed(WorkerSpawned(f"w{number}", f"w{number}"))
        driver.hello(f"w{number}")
    driver.wait(70)
    assert isinstance(driver.fleet.phase, Running)
    spare = next(name for name in driver.fleet.members if not driver.fleet.record.has_seat(name))
    driver.voted(0)
    driver.feed(DrainRequested(spare))
    driver.wait(1)
    assert driver.fleet.workers[spare].standing is WorkerStatus.DISMISSED
    for training in (1, 2):
        begins(driver, spare, training)
        name, finish = sends(driver.done, Finish)[-1]
        assert (name, finish.failure, finish.training) == (spare, None, training)
    assert not [name for name, _ in sends(driver.done, Assign) if name == spare][1:]


def beats(driver: Driver, seconds: float, *workers: str) -> None:
    """Time passes, in which these workers say that they live."""
    end_s = driver.now_s + seconds
    while driver.now_s < end_s:
        driver.wait(1)
        for name in workers:
            driver.say(name, Beat(generation=0, step=3, activity="reads the last checkpoint"))


def test_rank_0_dies_between_two_trainings_and_the_others_may_take_their_time() -> None:
    driver = trained(4)
    main, *others = driver.fleet.members
    driver.kill(main)
    beats(driver, 100, *others)
    assert driver.end is None
    for name in others:
        begins(driver, name, 1)
    assert driver.fleet.training == 1


def test_rank_0_dies_after_the_last_training_and_who_is_silent_is_not_waited_for() -> None:
    driver = trained(4)
    main, *others = driver.fleet.members
    driver.kill(main)
    beats(driver, 20, *others)
    driver.wait(30)
    assert driver.end is None
    driver.wait(10)
    assert driver.end == Ended(0, "3 steps done")


def test_all_die_behind_a_loop_and_newcomers_go_on_with_the_script() -> None:
    driver = trained()
    for name in ("w0", "w1"):
        driver.kill(name)
    newcomers = list(driver.fleet.workers)
    assert len(newcomers) == 2
    assert driver.end is None
    for name in newcomers:
        driver.hello(name)
        assert sends(driver.done, TrainingOver)[-1][0] == name
        begins(driver, name, 1, OTHER)
    assert set(driver.fleet.members) == set(newcomers)


def test_all_die_behind_a_loop_and_nobody_comes() -> None:
    driver = trained(replace=False)
    for name in ("w0", "w1"):
        driver.kill(name)
    driver.wait(1)
    assert driver.end is not None
    assert driver.end.exit_code == 1
    assert "3 steps are done, and all workers were lost before the script came to its end" in driver.end.text


def test_a_newcomer_whose_script_ends_behind_the_loop_ends_the_run() -> None:
    driver = trained()
    for name in ("w0", "w1"):
        driver.kill(name)
    newcomer = next(iter(driver.fleet.workers))
    driver.hello(newcomer)
    driver.feed(ConnectionLost(newcomer))
    driver.kill(newcomer, code=0)
    driver.wait(1.5)
    assert driver.end == Ended(0, "3 steps done")
