"""A node that says before it goes hands over its state and its sums: what it has computed is not computed again."""

import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.depth import nightly
from tests.unit.testing import work
from tests.unit.testing.work import disturbed
from varuna.core.plan import Plan
from varuna.engine.base.spans import Span
from varuna.planner.choose import plan_run
from varuna.testing import Fault, fail_at, notice_at, ranks
from varuna.testing.faults import Warned

STEPS, MICRO_BATCHES, SLOW_STEP = 4, 24, 2
NOTICE, LAST = 9, 12
"""Backwards of the first and of the last stage: at one the notice comes, the other one is not done before it counts."""


class WarnedTogether(Warned):
    """Notices come to several ranks as rank 0 begins its 9th backward; they are too short for the step."""

    def __init__(self, *leavers: int) -> None:
        super().__init__(0, SLOW_STEP, "B", 0.1)
        self._leavers, self._left = leavers, NOTICE - 1

    def on_span(self, span: Span) -> None:
        here = (span.phase, span.rank, span.step, span.name) == ("begin", self.rank, self.step, self.phase)
        if here and self._left:
            self._left -= 1
        elif self.is_here(span):
            for rank in self._leavers:
                self.tell(rank, self.seconds)


class Work:
    """Counts the backwards of one step on the last stage, which waits in one of them until the step is broken off."""

    def __init__(self, stages: int, *, is_broken_off: bool = True) -> None:
        self.backwards: Counter[int] = Counter()
        self._last = stages - 1
        self._broken_off = threading.Event()
        if not is_broken_off:
            self._broken_off.set()

    def hear(self, span: Span) -> None:
        if (span.phase, span.name) == ("begin", "hold"):
            self._broken_off.set()
        if (span.phase, span.step, span.name) == ("begin", SLOW_STEP, "B") and span.stage == self._last:
            self.backwards[span.index] += 1
            if len(self.backwards) == LAST:
                assert self._broken_off.wait(60), "the step was not broken off"


script = work.script(STEPS, MICRO_BATCHES, 2)


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    return work.alone(STEPS, MICRO_BATCHES, 2)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("leavers", [(1,), *nightly((0,), (2,), (0, 2))])
def test_a_notice_costs_one_pipeline_what_is_in_flight(alone: tuple[float, ...], leavers: tuple[int, ...]) -> None:
    seen = Work(3)
    outcome = disturbed(script, seen.hear, {3: 3, 2: 2, 1: 1}, [WarnedTogether(*leavers)])
    assert outcome.losses == pytest.approx(alone, rel=1e-6)
    assert outcome.plans == ("3x1", f"{3 - len(leavers)}x1")
    assert 8 <= outcome.kept[1] < MICRO_BATCHES
    again = [number for number, often in seen.backwards.items() if often > 1]
    assert len(again) <= 3, "those on their way back from the last stage"


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_leaver_that_dies_while_its_state_moves_is_a_loss_without_a_notice(alone: tuple[float, ...]) -> None:
    faults: list[Fault] = [WarnedTogether(1), fail_at(rank=2, step=SLOW_STEP, phase="form")]
    outcome = disturbed(script, Work(3).hear, {3: 3, 2: 2}, faults)
    assert outcome.plans == ("3x1", "2x1", "2x1")
    assert (outcome.kept[1] > 0, outcome.kept[2]) == (True, 0), "its sums were nowhere else"
    assert outcome.losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_notice_with_time_enough_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes longer than all steps together, and yet the run does not end before anybody leaves."""
    planned = plan_run

    def slowly(*args: Any, **options: Any) -> Plan:
        time.sleep(1.0)
        return planned(*args, **options)

    monkeypatch.setattr(ranks, "plan_run", slowly)
    longer = work.script(2 * STEPS, MICRO_BATCHES, 2)
    faults = [notice_at(rank=1, step=SLOW_STEP, seconds=10.0)]
    outcome = disturbed(longer, Work(3, is_broken_off=False).hear, {3: 3, 2: 2}, faults)
    assert outcome.losses == pytest.approx(work.alone(2 * STEPS, MICRO_BATCHES, 2), rel=1e-6)
    assert (outcome.plans, outcome.kept) == (("3x1", "2x1"), (0, 0))
