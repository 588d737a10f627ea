"""A copy in another worker counts as a holder of a section that has only one, if it is of the same step."""

import pytest

from tests.unit.fleet.support import Driver, make_job, make_plan
from varuna.core.devices import WorkerGroups
from varuna.core.messages import StopReport, Voted
from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.run_events import Notice, VerdictReached


def copied(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    """As many stages as workers."""
    return make_plan(job, workers, micro_batch).model_copy(update={"copies": Copies.STATE})


@pytest.fixture
def driver() -> Driver:
    """4x1 over eight sections, in the middle of step 2; nobody replaces the lost."""
    driver = Driver(FleetConfig(workers=4, replace=False), plan=copied, job=make_job(sections=8, steps=100))
    driver.begin(0, 1)
    return driver


def answer(driver: Driver, worker: str, next_step: int = 2, *, copies: bool = True) -> None:
    """A worker reports its seat's sections, and those of the one that it keeps a copy of."""
    rank = driver.fleet.rank_of(worker)
    assert rank is not None
    owner = driver.fleet.record.copied_from(rank)
    assert owner is not None
    kept = driver.seat_sections(driver.fleet.record.grid[owner])
    held = StopReport(
        generation=driver.fleet.generation,
        next_step=next_step,
        sections=driver.seat_sections(worker),
        copies=kept if copies else (),
    )
    driver.say(worker, held)


def rolled_back(driver: Driver) -> bool:
    return any("ROLLBACK" in event.text for event in driver.told(Notice))


def test_each_rank_knows_whose_copy_it_keeps_and_who_keeps_its_own(driver: Driver) -> None:
    pairs = [(driver.assignments[f"w{rank}"].copy_from, driver.assignments[f"w{rank}"].copy_to) for rank in range(4)]
    assert pairs == [(2, 2), (3, 3), (0, 0), (1, 1)]


def test_the_state_of_a_dead_worker_comes_from_its_copy(driver: Driver) -> None:
    driver.kill("w1")
    for worker in ("w0", "w2", "w3"):
        answer(driver, worker)
    record = driver.fleet.record
    assert (record.plan.shape, record.first_step, record.rollback, record.steps_redone) == ("3x1", 2, False, 1)
    moves = {move for name in record.grid for move in driver.assignments[name].transfers}
    kept = {"w0": {0, 1, 4, 5}, "w2": {0, 1, 4, 5}, "w3": {2, 3, 6, 7}}
    for rank, name in enumerate(record.grid):
        came = {move.section: record.grid[move.source_rank] for move in moves if move.target_rank == rank}
        assert set(record.plan.first.sections_of(rank)) <= kept[name] | came.keys()
        assert all(section in kept[source] for section, source in came.items())
    assert not rolled_back(driver)


def test_a_copy_that_is_not_complete_is_none(driver: Driver) -> None:
    driver.kill("w1")
    answer(driver, "w0")
    answer(driver, "w2")
    answer(driver, "w3", copies=False)
    assert driver.fleet.record.rollback
    assert rolled_back(driver)


def test_an_owner_and_its_keeper_are_too_many(driver: Driver) -> None:
    driver.kill("w1")
    driver.kill("w3")
    answer(driver, "w0")
    answer(driver, "w2")
    assert driver.fleet.record.rollback


def test_two_workers_whose_keepers_live_are_not(driver: Driver) -> None:
    driver.kill("w1")
    driver.kill("w2")
    answer(driver, "w0")
    answer(driver, "w3")
    assert not driver.fleet.record.rollback
    assert driver.fleet.record.plan.shape == "2x1"


def test_a_death_between_vote_and_copy_goes_back(driver: Driver) -> None:
    """The others have the vote on step 2 and apply it; what w1 has applied has no copy yet, and the old one is old."""
    driver.kill("w1")
    vote = driver.vote(2)
    held = StopReport(generation=0, next_step=3, sections=driver.seat_sections("w0"), votes=(vote,))
    driver.say("w0", held)
    answer(driver, "w2")  # still before the step, with the old copy of w1
    answer(driver, "w3")
    assert [event.laggards for event in driver.told(VerdictReached)] == [("w2", "w3")]
    for worker in ("w2", "w3"):
        answer(driver, worker, 3, copies=False)
    assert driver.fleet.record.rollback


def test_a_death_with_the_only_result_of_a_vote_runs_the_step_again(driver: Driver) -> None:
    driver.kill("w1")
    for worker in ("w0", "w2", "w3"):
        answer(driver, worker, 2)
    assert (driver.fleet.record.rollback, driver.fleet.record.first_step) == (False, 2)


def test_copies_last_until_the_next_generation_has_formed(driver: Driver) -> None:
    """w2 dies as w1's sections move: w0 still has its copy, and w3 that of w1."""
    driver.kill("w1")
    for worker in ("w0", "w2", "w3"):
        answer(driver, worker)
    driver.kill("w2")
    first = driver.fleet.history[0]
    for worker, copies in (("w0", (4, 5)), ("w3", (2, 3))):
        sections = tuple(first.plan.first.sections_of(first.ranks[worker]))
        driver.say(worker, StopReport(generation=1, next_step=2, sections=sections, copies=copies))
    assert driver.fleet.generation == 2
    assert (driver.fleet.record.plan.shape, driver.fleet.record.rollback) == ("2x1", False)
    driver.say("w0", Voted(vote=driver.vote(2)))
    assert driver.fleet.recorded.step == 2
