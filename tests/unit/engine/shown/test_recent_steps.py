from itertools import pairwise

import pytest

from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup
from tests.unit.schedule.validator import parse_row
from varuna.core.messages import StepShown
from varuna.core.times import Interval
from varuna.engine.links.transfer_time import TransferTime
from varuna.engine.pipeline.timeline import Messages, StepTimes, interval_of
from varuna.engine.shown.recent_steps import STEPS_KEPT, RanStep, RecentSteps


def ran(step: int, generation: int = 0) -> RanStep:
    took = interval_of(parse_row("0F0")[0], 100.0, 100.5)
    times = StepTimes(step, 99.0, 101.0, (took,), ())
    return RanStep(
        generation, 0, times, Messages((3,), [(0, TransferTime(8, 100.5))], []), (TransferTime(9, 100.25, 100.75),)
    )


def timeline_of(ran: RanStep) -> StepShown:
    told: list[StepShown] = []
    recent = RecentSteps(told.append)
    recent.add_step(ran)
    recent.request_step(ran.times.step)
    recent.answer()
    [shown] = told
    return shown


def test_steps_are_told_once_they_are_over_with_seconds_from_their_own_begin() -> None:
    told: list[StepShown] = []
    recent = RecentSteps(told.append)
    recent.request_step(5)
    recent.add_step(ran(4))
    recent.answer()
    assert told == []
    recent.add_step(ran(5))
    recent.answer()
    recent.answer()
    [shown] = told
    assert shown.timeline is not None
    assert shown.timeline.actions == (Interval("F", 0, 1.0, 1.5),)
    assert shown.timeline.sent == (Interval("activation", 0, 1.5, 2.0, 8),)  # under way: to the end of the step
    assert shown.timeline.sums == (Interval("reduce", -1, 1.25, 1.75, 9),)
    assert shown.timeline.zero_s == 99.0


def test_of_a_step_that_ran_again_the_newest_is_told_and_of_a_forgotten_one_nothing() -> None:
    told: list[StepShown] = []
    recent = RecentSteps(told.append)
    for step in (*range(10), 3, *range(4, 9)):
        recent.add_step(ran(step, generation=step < 9))
    for step in range(100, 100 + STEPS_KEPT - 1):
        recent.add_step(ran(step))
    recent.request_step(8)
    recent.request_step(3)
    recent.answer()
    assert [(each.step, each.timeline is None) for each in told] == [(3, True), (8, False)]


def test_memory_is_bounded_by_rows_but_the_newest_step_is_there() -> None:
    recent = RecentSteps(lambda shown: None, rows_kept=3)
    for step in range(10):
        recent.add_step(ran(step))
    assert [each.times.step for each in recent._kept] == [7, 8, 9]
    big = ran(10)
    recent.add_step(big._replace(times=big.times._replace(actions=big.times.actions * 9)))
    assert [each.times.step for each in recent._kept] == [10]


def test_every_rank_tells_each_action_once_in_order_and_when_its_messages_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[RanStep] = []
    monkeypatch.setattr(RecentSteps, "add_step", lambda recent, ran: steps.append(ran))
    Setup(SmallLanguage).run(2, 2, steps=3)
    monkeypatch.undo()
    found = {}
    for each in steps:
        if each.times.step < 2:
            continue
        shown = timeline_of(each)
        assert shown.timeline is not None
        found[shown.timeline.rank] = shown.timeline
    assert sorted(found) == [0, 1, 2, 3]
    for number, rank in found.items():
        mine = range(sum(did.kind == "F" for did in rank.actions))
        assert sorted(did.micro_batch for did in rank.actions if did.kind == "F") == list(mine)
        assert sorted(did.micro_batch for did in rank.actions if did.kind in "BI") == list(mine)
        assert all(before.end_s <= after.begin_s for before, after in pairwise(rank.actions))
        assert [sent.kind for sent in rank.sent] == ["gradient" if number % 2 else "activation"] * len(mine)
        makes = {(did.kind, did.micro_batch): did for did in rank.actions}
        for sent in rank.sent:  # a message leaves while the action that makes it runs
            made = makes.get(("F", sent.micro_batch)) if sent.kind == "activation" else None
            made = made or makes.get(("B", sent.micro_batch)) or makes["I", sent.micro_batch]
            assert made.begin_s < sent.begin_s <= made.end_s
            assert sent.begin_s <= sent.end_s
        assert {end.kind for end in rank.ends} >= {"reduce", "vote", "apply"}
        assert rank.sums
