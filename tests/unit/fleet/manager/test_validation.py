"""Claims that a worker cannot truthfully make, and those that it may."""

from dataclasses import replace

import pytest

from tests.unit.fleet.support import Driver, make_vote, two_stages, with_history
from varuna.core.devices import WorkerGroups
from varuna.core.messages import Beat, FromWorker, Saved, StopReport, Vote, Voted
from varuna.core.model import JobFacts, Memory
from varuna.core.plan import Copies, Plan
from varuna.core.saved import SavedShard
from varuna.core.sums import HeldSums, IndexSet, InheritedSum, MicroBatchLoss, RemainingWork, SectionSum
from varuna.fleet.manager.validation import objection
from varuna.fleet.state.causes import Objection
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import WorkerDistrusted, WorkerExited, WorkerSpawned
from varuna.fleet.state.outputs import Kill
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.run_events import GenerationRecord


def running() -> Driver:
    driver = Driver(FleetConfig(workers=4), plan=two_stages)
    driver.begin(0, 1)
    driver.wait(0.4)
    return driver


def vote(driver: Driver, step: int, **changes: object) -> Vote:
    return make_vote(driver.fleet.record.plan, 0, step).model_copy(update=changes)


def shard(**changes: object) -> Saved:
    values = {"step": 2, "section": 0, "file": "step-2/section-0.safetensors", "size_bytes": 10, "generation": 0}
    return Saved(shard=SavedShard.model_validate({**values, **changes}))


def summed(spans: IndexSet, *losses: MicroBatchLoss, section: int = 0) -> StopReport:
    sections = (SectionSum(section=section, micro_batches=spans),)
    held = HeldSums(micro_batch=2, sections=sections, losses=losses)
    return StopReport(generation=0, next_step=2, sections=(0, 1), sums=held)


def text(found: Objection | None) -> str:
    assert found is not None
    return found.text


def test_lies_are_named() -> None:
    driver = running()
    w0, sections = driver.fleet.members[0], (0, 1)
    lies: list[tuple[FromWorker, str]] = [
        (Beat(generation=5, step=0, activity=""), "the newest is 0"),
        (StopReport(generation=1, next_step=2), "the newest is 0"),
        (StopReport(generation=0, next_step=2, sections=(2, 3)), "never given"),
        (StopReport(generation=0, next_step=2, sections=(0, 1, 2, 3)), "never given"),
        (StopReport(generation=0, next_step=2, sections=(0,), lent=(1,)), "never given"),
        (StopReport(generation=0, next_step=2, sections=sections, copies=(2, 3)), "which nobody has sent it"),
        (StopReport(generation=0, next_step=None, copies=(2, 3)), "without a step"),
        (StopReport(generation=0, next_step=9, sections=sections), "step 2 is not committed"),
        (StopReport(generation=0, next_step=None, sections=sections), "without a step"),
        (
            StopReport(generation=0, next_step=2, sections=sections, votes=(vote(driver, 1, vector=(1.0,)),)),
            "1 numbers",
        ),
        (summed(((7, 9),)), "other micro-batches than 8"),
        (summed(((3, 5), (4, 6))), "other micro-batches than 8"),
        (summed(((3, 5),)), "micro-batches that it was never given"),
        (summed(((0, 7),)), "micro-batches that it was never given"),
        (summed(((0, 2),), section=2), "sections or micro-batches that it was never given"),
        (summed((), MicroBatchLoss(micro_batch=8, values=(1.0, 2.0))), "2 numbers for one of 8"),
        (summed((), MicroBatchLoss(micro_batch=7, values=(1.0,))), "2 numbers for one of 8"),
        (Voted(vote=vote(driver, 2, vector=(0.0,) * 3)), "3 numbers"),
        (Voted(vote=vote(driver, 2, generation=7)), "the newest is 0"),
        (Voted(vote=vote(driver, 10**6)), "of 100"),
        (Voted(vote=vote(driver, 98)), "vote of step 98, but step 2 is not committed"),
        (
            StopReport(generation=0, next_step=2, sections=sections, votes=(vote(driver, 2), vote(driver, 4))),
            "step 3 is not",
        ),
        (shard(file="/etc/passwd"), "outside"),
        (shard(file="../x"), "outside"),
        (shard(section=4), "impossible"),
        (shard(generation=3), "impossible"),
        (shard(section=2), "section 2, which it did not have in generation 0"),
    ]
    for message, said in lies:
        assert said in text(objection(driver.fleet, w0, message)), message


@pytest.mark.parametrize("spans", [((0, 1), (2, 4)), ((0, 4),), ((0, 8),)], ids=["some", "its share", "reduced"])
def test_sums_of_what_was_given_are_believed(spans: IndexSet) -> None:
    driver = running()
    assert objection(driver.fleet, driver.fleet.members[0], summed(spans)) is None


def test_sums_that_a_worker_went_on_from_are_believed_in_that_step_only() -> None:
    driver = running()
    plan, w0 = driver.fleet.record.plan, driver.fleet.members[0]
    own = (InheritedSum(section=0, micro_batches=((4, 6),), source_rank=2),)
    left = RemainingWork(micro_batches=8, taken=(own, (), (), ()), work=(((0, 2),), ((2, 4), (6, 8))))
    record = driver.fleet.record.model_copy(update={"remainder": left, "first_step": 2})
    fleet = with_history(driver.fleet, (record,))
    assert plan.micro_batches == 8
    assert objection(fleet, w0, summed(((0, 2), (4, 6)))) is None
    assert "never given" in text(objection(fleet, w0, summed(((0, 3), (4, 6)))))
    later = summed(((0, 2), (4, 6))).model_copy(update={"next_step": 3})
    fleet = replace(fleet, recorded=RecordedSteps(step=2))
    assert "never given" in text(objection(fleet, w0, later))
    assert objection(fleet, w0, summed(((0, 4),)).model_copy(update={"next_step": 3})) is None


def test_in_the_first_step_some_state_is_on_its_way_and_what_was_there_before_is_kept() -> None:
    driver = running()
    w0, w1 = driver.fleet.members[:2]
    changes = {"generation": 1, "first_step": 2, "members": (w1, w0, *driver.fleet.members[2:])}
    second = GenerationRecord.model_validate({**driver.fleet.record.model_dump(), **changes})
    fleet = with_history(driver.fleet, (driver.fleet.record, second))

    def said(sections: tuple[int, ...], lent: tuple[int, ...], copies: tuple[int, ...], step: int = 2) -> str | None:
        held = StopReport(generation=1, next_step=step, sections=sections, lent=lent, copies=copies)
        found = objection(fleet, w0, held)
        return None if found is None else found.text

    assert said((3,), (2,), (0, 1)) is None
    assert said((), (2, 3), (1,)) is None
    assert "never given" in (said((3,), (1,), ()) or "")
    fleet = replace(fleet, recorded=RecordedSteps(step=2))
    assert "never given" in (said((3,), (2,), (), 3) or "")
    assert "nobody has sent" in (said((2, 3), (), (0, 1), 3) or "")


def test_honest_words_pass_at_every_moment_of_a_morph() -> None:
    driver = running()
    w0, plan = driver.fleet.members[0], driver.fleet.record.plan
    assert objection(driver.fleet, w0, StopReport(generation=0, next_step=2, sections=(0, 1))) is None
    ahead = StopReport(generation=0, next_step=3, sections=(0, 1), votes=(make_vote(plan, 0, 2),))
    assert objection(driver.fleet, w0, ahead) is None
    assert objection(driver.fleet, w0, StopReport(generation=0, next_step=None)) is None
    nan = vote(driver, 2, vector=(float("nan"),) * len(make_vote(plan, 0, 2).vector))
    assert objection(driver.fleet, w0, Voted(vote=nan)) is None
    assert objection(driver.fleet, w0, shard()) is None
    driver.kill(driver.fleet.members[3])
    driver.all_held(2)
    assert driver.fleet.generation == 1
    for name in driver.fleet.members:  # before the new generation has formed, they still hold what they had
        old = tuple(plan.first.sections_of(plan.place_of(driver.fleet.history[0].members.index(name)).stage))
        assert objection(driver.fleet, name, StopReport(generation=1, next_step=2, sections=old)) is None


def test_a_false_vote_does_not_become_the_newest_step() -> None:
    driver = Driver(FleetConfig(workers=5), plan=two_stages)
    driver.begin(0, 1)
    spare = driver.fleet.members[4]
    driver.wait(0.4)
    assert "did not take part" in text(objection(driver.fleet, spare, Voted(vote=vote(driver, 2))))
    w0, w1 = driver.fleet.members[:2]
    late = Voted(vote=vote(driver, 9))  # the manager was away for long, and nobody is left who has the votes between
    assert objection(driver.fleet, w0, late)
    driver.say(w1, Beat(generation=0, step=9, activity=""))
    assert objection(driver.fleet, w0, late) is None


def test_votes_of_a_timeline_that_a_rollback_abandoned_are_no_lies() -> None:
    driver = Driver(FleetConfig(workers=3, replace=False), plan=two_stages)
    driver.begin(*range(10))
    old = vote(driver, 10)
    driver.kill("w1")  # the only holder of the second stage
    driver.held("w0", 10)
    driver.held("w2", None)
    assert driver.fleet.record.rollback
    assert objection(driver.fleet, "w0", Voted(vote=old)) is None


def test_who_has_no_seat_has_saved_nothing_and_who_had_one_may_save_for_it_later() -> None:
    driver = running()
    assert driver.fleet.members[0] == "w0"
    driver.feed(WorkerSpawned("w4", "local"))
    assert "in which it had no seat" in text(objection(driver.fleet, "w4", shard()))
    driver.hello("w4")
    driver.feed(WorkerExited("w3", -9, ""))
    driver.all_held(2)
    assert driver.fleet.generation == 1
    assert objection(driver.fleet, "w0", shard()) is None


def test_strangers_have_nothing_to_lie_about() -> None:
    driver = running()
    assert objection(driver.fleet, "w9", Beat(generation=9, step=0, activity="")) is None


@pytest.mark.parametrize("worker", ["w1", "w9"])
def test_who_is_distrusted_is_lost_and_killed_once(worker: str) -> None:
    driver = running()
    instructions = driver.feed(WorkerDistrusted(worker, "it lies"))
    assert [each.worker for each in instructions if isinstance(each, Kill)] == (["w1"] if worker == "w1" else [])
    assert "w1" in driver.fleet.workers or worker == "w1"
    assert driver.feed(WorkerDistrusted(worker, "it lies")) == []


def test_what_is_shared_out_is_whole_with_its_holders_only() -> None:
    driver = Driver(FleetConfig(workers=6), plan=two_stages)
    driver.job = driver.job.model_copy(update={"memory": Memory(shard_optimizer=True)})
    driver.begin(0, 1)
    w0 = driver.fleet.members[0]
    said = [
        StopReport(generation=0, next_step=2, sections=(0,), lent=(1,)),
        StopReport(generation=0, next_step=2, sections=(0,)),
        StopReport(generation=0, next_step=2, sections=(0, 1)),
        StopReport(generation=0, next_step=2, sections=(1,), lent=(0,)),
        StopReport(generation=0, next_step=None, lent=(1,)),
    ]
    assert [bool(objection(driver.fleet, w0, held)) for held in said] == [False, False, True, True, True]


def copied(copies: Copies) -> Driver:
    """2x1 or, with sums alone, 2x2, after a step; ranks keep copies of the next one of the other stage or replica."""

    def planned(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return two_stages(job, workers, micro_batch).model_copy(update={"copies": copies})

    driver = Driver(FleetConfig(workers=4 if copies is Copies.SUMS else 2), plan=planned)
    driver.begin(0)
    return driver


def sums_of(*sections: int, spans: IndexSet) -> tuple[SectionSum, ...]:
    return tuple(SectionSum(section=each, micro_batches=spans) for each in sections)


def test_sums_of_the_rank_whose_copy_a_worker_keeps_are_no_lie() -> None:
    driver = copied(Copies.STATE)

    def held(*sections: int, own: tuple[int, ...] = (), copies: tuple[int, ...] = (2, 3)) -> StopReport:
        spans: IndexSet = ((0, 3),)
        sums = HeldSums(micro_batch=2, sections=sums_of(*own, spans=spans), copies=sums_of(*sections, spans=spans))
        return StopReport(generation=0, next_step=1, sections=(0, 1), copies=copies, sums=sums)

    assert objection(driver.fleet, "w0", held(2, 3, own=(0, 1))) is None
    assert objection(driver.fleet, "w0", held(2)) is None
    assert "never given" in text(objection(driver.fleet, "w0", held(own=(2,)))), "they are not its own"
    record = driver.fleet.record
    fields = {name: getattr(record, name) for name in GenerationRecord.model_fields}
    without = GenerationRecord.model_validate({**fields, "keepers": ()})
    driver.fleet = with_history(driver.fleet, [without])
    assert "never given" in text(objection(driver.fleet, "w0", held(2, copies=())))


def test_copied_sums_are_of_the_owners_share_and_bring_no_state() -> None:
    driver = copied(Copies.SUMS)
    keeper = driver.fleet.members[2]
    assert driver.fleet.record.copied_from(2) == 0, "which runs the same sections"
    theirs, mine = ((0, 3),), ((4, 8),)

    def held(spans: IndexSet, section: int = 0, copies: tuple[int, ...] = ()) -> StopReport:
        sums = HeldSums(
            micro_batch=2, sections=sums_of(0, 1, spans=mine), copies=sums_of(section, section + 1, spans=spans)
        )
        return StopReport(generation=0, next_step=1, sections=(0, 1), sums=sums, copies=copies)

    assert objection(driver.fleet, keeper, held(theirs)) is None
    assert "never given" in text(objection(driver.fleet, keeper, held(((2, 5),))))
    assert "never given" in text(objection(driver.fleet, keeper, held(theirs, section=2)))
    assert "nobody has sent it" in text(objection(driver.fleet, keeper, held(theirs, copies=(0, 1))))
