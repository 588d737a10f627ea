"""A run of any length in bounded memory."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from varuna.fleet.page.step_history import StepHistory
from varuna.fleet.run_folder.past_events import PastStep


def point(step: int, loss: float = 0.0) -> PastStep:
    return PastStep(step, 10.0 * step, loss, 2.0)


def test_a_long_run_keeps_its_extremes_in_bounded_memory_and_its_newest_steps_one_by_one() -> None:
    history = StepHistory(most=50, recent=20)
    for step in range(10_000):
        history.add_point(point(step, {4321: 99.0, 77: -9.0}.get(step, math.sin(step))))
    told = history.describe()
    first, last, loss, recent = told["first"], told["last"], told["loss"], told["recent"]
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert isinstance(loss, list)
    assert isinstance(recent, list)
    assert len(first) <= 50
    assert [row[0] for row in recent] == list(range(9980, 10_000))
    assert first[0] == 0
    assert [*last[:-1]] == [each - 1 for each in first[1:]]
    assert last[-1] == 9979
    assert max(most for _, _, most in loss) == 99.0
    assert min(least for least, _, _ in loss) == -9.0


def test_a_step_that_runs_again_replaces_what_followed() -> None:
    history = StepHistory(most=50, recent=20)
    for step in (*range(100), *range(90, 95)):
        history.add_point(point(step, float(step)))
    recent = history.describe()["recent"]
    assert isinstance(recent, list)
    assert recent[-1][0] == 94
    assert len({row[0] for row in recent}) == len(recent)


def test_a_loss_that_is_not_a_number_is_told_as_none_and_spoils_no_mean() -> None:
    history = StepHistory(most=4, recent=1)
    for step in range(8):
        history.add_point(point(step, math.nan if step % 2 else 3.0))
    told = history.describe()
    assert told["loss"] == [[3.0, 3.0, 3.0]] * 4
    assert told["recent"] == [[7, 70.0, None, 2.0]]


@settings(max_examples=by_depth(10, 60), deadline=None)
@given(st.lists(st.integers(0, 60), max_size=120))
def test_buckets_are_in_order_and_do_not_overlap_whatever_is_undone(starts: list[int]) -> None:
    history = StepHistory(most=8, recent=5)
    step = -1
    for start in starts:
        step = min(step + 1, start)
        history.add_point(point(step))
    told = history.describe()
    first, last, recent = told["first"], told["last"], told["recent"]
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert isinstance(recent, list)
    assert len(first) <= 8
    assert all(begin <= end for begin, end in zip(first, last, strict=True))
    assert all(end < begin for end, begin in zip(last, first[1:], strict=False))
    assert [row[0] for row in recent] == sorted({row[0] for row in recent})
