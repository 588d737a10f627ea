"""Parts of a broken step that a generation keeps: whose sums, what runs again, and what is void."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.unit.fleet.support import Driver, make_job, make_plan, preempted, two_stages
from varuna.core.devices import WorkerGroups, size_of
from varuna.core.messages import Beat, StopReport, Voted, WorkerPhase
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.sums import HeldSums, IndexSet, MicroBatchLoss, SectionSum
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.outputs import Publish, Send
from varuna.fleet.state.run_events import GenerationStarted, Notice
from varuna.fleet.state.speeds import Speeds

MICRO_BATCHES = 8


@pytest.fixture
def driver() -> Driver:
    """2x2 over four sections, in the middle of step 1; nobody replaces the lost."""
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages, job=make_job(sections=4, steps=100))
    driver.begin(0)
    return driver


def sums(sections: Mapping[int, IndexSet], losses: range = range(0), micro_batch: int = 2) -> HeldSums:
    return HeldSums(
        micro_batch=micro_batch,
        sections=tuple(SectionSum(section=section, micro_batches=spans) for section, spans in sections.items()),
        losses=tuple(MicroBatchLoss(micro_batch=number, values=(1.0, 2.0)) for number in losses),
    )


def answer(driver: Driver, worker: str, held: HeldSums | None, next_step: int = 1) -> None:
    sections = driver.seat_sections(worker)
    driver.say(
        worker, StopReport(generation=driver.fleet.generation, next_step=next_step, sections=sections, sums=held)
    )


def test_the_pipeline_that_is_whole_goes_on_from_its_sums(driver: Driver) -> None:
    """Rank 1 is lost. Ranks 2 and 3 have run 4 and 5, and the last stage the forward of 6."""
    driver.kill("w1")
    answer(driver, "w0", sums({0: ((0, 3),), 1: ((0, 3),)}))
    answer(driver, "w2", sums({0: ((4, 6),), 1: ((4, 6),)}))
    answer(driver, "w3", sums({2: ((4, 6),), 3: ((4, 7),)}, range(4, 7)))
    record = driver.fleet.record
    assert record.plan.shape == "2x1"
    assert record.grid == ("w2", "w3")
    assert record.kept_micro_batches == 2
    first, last = (driver.assignments[name].rest for name in record.grid)
    assert first is not None
    assert last is not None
    assert first.work == last.work == ((0, 4), (6, 8))
    assert [each.micro_batches for each in first.taken] == [((4, 6),), ((4, 6),)]
    assert [each.micro_batches for each in last.kept] == [((4, 6),), ((4, 7),)]
    assert (first.losses, [each.micro_batch for each in last.losses]) == ((), [4, 5])
    assert driver.assignments["w0"].rest is None, "a spare"
    assert "kept 2 of 8 micro-batches of step 1" in "".join(event.text for event in driver.told(Notice))
    begun = [isinstance(item, Publish) and isinstance(item.event, GenerationStarted) for item in driver.done]
    told = [isinstance(item, Send) and item.worker == "w2" for item in driver.done]
    assert max(n for n, is_it in enumerate(begun) if is_it) < max(n for n, is_it in enumerate(told) if is_it)


def test_another_loss_keeps_what_has_been_added_since(driver: Driver) -> None:
    driver.kill("w1")
    answer(driver, "w0", sums({0: ((0, 3),), 1: ((0, 3),)}))
    answer(driver, "w2", sums({0: ((4, 6),), 1: ((4, 6),)}))
    answer(driver, "w3", sums({2: ((4, 6),), 3: ((4, 6),)}, range(4, 6)))
    driver.kill("w0")  # the spare
    driver.say(
        "w2", StopReport(generation=1, next_step=1, sections=(0, 1), sums=sums({0: ((0, 2), (4, 6)), 1: ((4, 6),)}))
    )
    driver.say(
        "w3",
        StopReport(
            generation=1, next_step=1, sections=(2, 3), sums=sums({2: ((0, 3), (4, 6)), 3: ((0, 3), (4, 6))}, range(6))
        ),
    )
    assert driver.fleet.generation == 2
    rest = driver.assignments["w2"].rest
    assert rest is not None
    assert rest.work == ((0, 4), (6, 8)), "section 1 lacks them"
    driver.say("w2", Voted(vote=driver.vote(1)))
    assert driver.fleet.record.kept_micro_batches == 2
    assert driver.fleet.record.remainder is None, "the step is recorded"


@pytest.mark.parametrize("case", ["another m", "one stage lacks all", "no losses"])
def test_what_does_not_fit_is_void(driver: Driver, case: str) -> None:
    m = 1 if case == "another m" else 2
    driver.kill("w1")
    answer(driver, "w0", None)
    answer(driver, "w2", sums({0: ((4, 6),), 1: ((4, 6),)}, micro_batch=m))
    stage: dict[int, IndexSet] = {} if case == "one stage lacks all" else {2: ((4, 6),), 3: ((4, 6),)}
    answer(driver, "w3", sums(stage, range(0) if case == "no losses" else range(4, 6), micro_batch=m))
    assert driver.fleet.generation == 1
    assert driver.fleet.record.kept_micro_batches == 0
    assert all(assignment.rest is None for assignment in driver.assignments.values())


def test_sums_of_a_timeline_that_was_given_up_are_void() -> None:
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages, job=make_job(sections=4, steps=100))
    driver.gather()
    driver.kill("w1")
    for name, sections in (("w0", (0, 1)), ("w2", (0, 1)), ("w3", (2, 3))):
        spans: IndexSet = ((4, 6),)
        held = sums(dict.fromkeys(sections, spans), range(MICRO_BATCHES))
        driver.say(name, StopReport(generation=0, next_step=0, sections=sections, sums=held))
    assert driver.fleet.generation == 1
    assert driver.fleet.record.kept_micro_batches == 0


@pytest.mark.parametrize(("begun", "kept"), [(("w2", "w3"), 2), (("w2",), 0), ((), 0)])
def test_the_first_step_is_kept_of_those_who_say_that_they_run_it(begun: tuple[str, ...], kept: int) -> None:
    """No vote has shown yet that they have the state that the generation began from.

    By the time that the loss is noticed, all of them wait for a decision about a link that broke.
    """
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages, job=make_job(sections=4, steps=100))
    driver.gather()
    for name in begun:
        driver.say(name, Beat(generation=0, step=0, activity="", phase=WorkerPhase.STEPS))
    for name in ("w0", "w2", "w3"):
        driver.say(name, Beat(generation=0, step=0, activity="", phase=WorkerPhase.OTHER))
    driver.kill("w1")
    answer(driver, "w0", None, next_step=0)
    answer(driver, "w2", sums({0: ((4, 6),), 1: ((4, 6),)}), next_step=0)
    answer(driver, "w3", sums({2: ((4, 6),), 3: ((4, 6),)}, range(4, 6)), next_step=0)
    assert driver.fleet.generation == 1
    assert driver.fleet.record.kept_micro_batches == kept


@pytest.mark.parametrize(("link_bytes_per_s", "kept"), [(1e3, 4), (10.0, 0)])
def test_sums_stay_where_computing_again_is_faster_than_their_way(link_bytes_per_s: float, kept: int) -> None:
    """4x1 becomes 2x1, a step of 8 s has half of its 8 micro-batches, and a stage's sums have 100 or 200 bytes."""
    job = make_job(sections=4, steps=100)
    driver = Driver(FleetConfig(workers=4, replace=False), plan=shallow, job=job, node_of=lambda worker: worker)
    driver.begin(0)
    driver.fleet = replace(
        driver.fleet,
        speeds=Speeds(link_bytes_per_s=link_bytes_per_s),
        recorded=replace(driver.fleet.recorded, wall_s=8.0),
    )
    driver.feed(preempted("w3", in_s=2))
    for number in range(4):
        answer(driver, f"w{number}", sums({number: ((0, 4),)}, range(4) if number == 3 else range(0)))
    record = driver.fleet.record
    assert (record.plan.shape, record.kept_micro_batches) == ("2x1", kept)


def shallow(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
    return make_plan(job, workers, micro_batch, stages=4 if size_of(workers) == 4 else 2)


def test_whoever_saw_that_sums_are_wrong_speaks_for_those_who_did_not(driver: Driver) -> None:
    """The vote reached rank 0 only: all others were stopped before they could read it, and offer what they have."""
    everything = ((0, MICRO_BATCHES),)
    for number in range(1, 4):
        worker = f"w{number}"
        sections = driver.seat_sections(worker)
        held = sums(dict.fromkeys(sections, everything), range(MICRO_BATCHES))
        if number == 1:
            driver.kill("w1")
        else:
            answer(driver, worker, held)
    driver.say("w0", StopReport(generation=0, next_step=1, sections=(0, 1), wrong_sums=True))
    assert driver.fleet.generation == 1
    assert driver.fleet.record.kept_micro_batches == 0
