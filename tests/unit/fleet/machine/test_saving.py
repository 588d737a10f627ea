"""A checkpoint that somebody asks for."""

from tests.unit.fleet.support import Driver, sends, two_stages
from varuna.core.messages import RaiseFlag
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import SaveRequested


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
