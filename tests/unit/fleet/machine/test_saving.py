"""A checkpoint that somebody asks for."""

from tests.unit.fleet.support import Driver, sends, two_stages
from varuna.core.messages import RaiseFlag, Saved
from varuna.core.saved import SavedShard
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import CheckpointCompleted, SaveRequested
from varuna.fleet.state.outputs import Collect
from varuna.fleet.state.questions import Checkpoint


def test_a_checkpoint_is_asked_of_rank_0_each_time_and_not_before_it_trains() -> None:
    driver = Driver(FleetConfig(workers=4), plan=two_stages)
    assert not sends(driver.feed(SaveRequested()), RaiseFlag)
    driver.gather()
    assert not sends(driver.done, RaiseFlag)
    driver.voted(0)
    assert [(name, flag.flag) for name, flag in sends(driver.done, RaiseFlag)] == [("w0", "checkpoint")]
    for _ in range(2):
        assert [flag.flag for _, flag in sends(driver.feed(SaveRequested()), RaiseFlag)] == ["checkpoint"]
    driver.voted(1)
    assert len(sends(driver.done, RaiseFlag)) == 3


def shard(step: int) -> SavedShard:
    return SavedShard(step=step, generation=0, section=0, file=f"{step}/0", size_bytes=1)


def test_a_shard_counts_once_the_step_before_it_is_recorded_and_no_word_of_a_worker_makes_a_checkpoint() -> None:
    driver = Driver(FleetConfig(workers=4), plan=two_stages)
    driver.begin(0)
    assert driver.say("w0", Saved(shard=shard(1))) == [Collect(shard(1))]
    for early in (90, 3, 2):
        assert driver.say("w0", Saved(shard=shard(early))) == []
    for step in (1, 2):
        driver.voted(step)
        assert driver.done.count(Collect(shard(step + 1))) == 1
    assert Collect(shard(90)) not in driver.done
    assert driver.fleet.recorded.early_shards == (shard(90),)
    assert driver.fleet.recorded.saved_step == 0
    driver.feed(CheckpointCompleted(3))
    assert driver.fleet.recorded.saved_step == 3


def test_a_run_that_begins_from_a_checkpoint_knows_of_it() -> None:
    driver = Driver(FleetConfig(workers=4), plan=two_stages, checkpoint=Checkpoint("ck/step-20", 20, 2))
    driver.gather()
    assert driver.fleet.recorded.saved_step == 20
