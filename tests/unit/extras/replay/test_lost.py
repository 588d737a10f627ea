"""Losses of a replay's goodput: the parts add up, and each cause is what it says."""

import pytest

from tests.depth import by_depth
from tests.unit.extras.replay.test_replay import CHURN, QUIET, replay, trace
from varuna.extras.replay.broken_steps import CopiedSum, copied_sums
from varuna.extras.replay.costs import MorphCosts
from varuna.extras.replay.lost import Account, LostBy, OutageSpan


@pytest.mark.parametrize("notice_s", by_depth([30.0], [0.0, 30.0]))
def test_goodput_and_what_was_lost_add_up_to_one(notice_s: float) -> None:
    every = [trace((0, "abcdefgh", ()), (600, (), "abcdefgh"), (700, "ijklmnop", ()), end_s=1300), QUIET, CHURN]
    for changes in by_depth(every[:1], every):
        outcome = replay(changes).morphing(notice_s=notice_s)
        assert outcome.goodput + sum(outcome.lost.values()) == pytest.approx(1.0, abs=1e-3)
        assert min(outcome.lost.values()) > -0.002


def test_a_quiet_run_loses_its_warm_up_and_checkpoints_alone() -> None:
    lost = replay(QUIET).morphing().lost
    large = {cause for cause, share in lost.items() if share > 0.002}
    assert large <= {LostBy.WARMING.value, LostBy.SAVING.value, LostBy.UNFINISHED.value}
    assert lost[LostBy.WARMING] == pytest.approx(MorphCosts().warm_s / 1800, rel=0.05)


@pytest.mark.nightly
def test_noticing_takes_a_lease() -> None:
    one = trace((0, "abcdefgh", ()), (601.3, (), "b"), end_s=900)
    slow, quick = (replay(one).morphing(MorphCosts(lease_s=lease_s)).lost for lease_s in (16.0, 6.0))
    assert slow[LostBy.NOTICING] == pytest.approx(quick[LostBy.NOTICING] * 16 / 6, rel=0.1)


def test_what_is_missing_has_one_cause_at_a_time() -> None:
    account = Account(lambda workers: float(workers))
    account.workers(0.0, there=4)
    account.does(10.0, OutageSpan(LostBy.SPARES, 3.0, 0.5))  # nobody was warm: all of it is missing for that
    account.workers(10.0, warm=4)
    account.does(20.0, OutageSpan(LostBy.NOTICING))
    lost = account.closed(22.0, 30)
    assert {cause: share for cause, share in lost.items() if share} == pytest.approx(
        {LostBy.WARMING: 40.0, LostBy.COPYING: 5.0, LostBy.SPARES: 5.0, LostBy.NOTICING: 8.0}
    )


def test_sums_are_taken_right_after_something_was_added_and_counted_once_they_are_there() -> None:
    added_s = [float(second) for second in range(100)]

    def made(until_s: float, *, goes_on: bool = False) -> list[CopiedSum]:
        pace = {"state_complete_s": 10.5, "link_bytes_per_s": 1e8, "step_s": 30.5}
        return list(copied_sums(added_s, {0: 10**8, 1: 10**8}, **pace, goes_on=goes_on, until_s=until_s))

    copies = made(30.0)
    assert [copy.section for copy in copies] == [0, 1], "there is time for one round, in the middle"
    assert [copy.taken_s for copy in copies] == [21.0, 23.0]
    assert [copy.complete_s for copy in copies] == [23.0, 25.0]
    assert not made(22.0), "the first is not complete"
    goes_on = made(30.0, goes_on=True)
    assert [copy.taken_s for copy in goes_on] == [11.0, 13.0, 21.0, 23.0], "what was there before is copied at once"
