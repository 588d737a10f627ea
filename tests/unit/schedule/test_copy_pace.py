"""How fast copies are made, and that a worker whose copies are always late makes few of them."""

from itertools import pairwise

import pytest

from varuna.schedule.copy_pace import (
    LONGEST_PAUSE_S,
    PROCESSOR_S_PER_BYTE,
    SHORT_S,
    CopyPace,
    SumsPace,
    copying_s,
    last_sums_s,
    pause_s,
    state_copying_s,
    state_pause_s,
    sums_pace,
    sums_pause_s,
)


def test_copies_take_half_of_a_links_time_and_never_pause_for_long() -> None:
    assert pause_s(0.004) == pytest.approx(0.004)
    assert pause_s(60.0) == LONGEST_PAUSE_S


def test_a_states_copy_makes_haste_for_a_fiftieth_of_a_step() -> None:
    assert state_pause_s(0.004, 1.9, 100.0) == 0.0
    assert state_pause_s(0.004, 2.1, 100.0) == pause_s(0.004)
    assert state_copying_s(2**30, 2**30, 100.0) == pytest.approx(1.0), "at once"
    assert state_copying_s(3 * 2**30, 2**30, 100.0) == pytest.approx(2.0 + 2.0), "the last third with pauses"
    assert state_copying_s(2**30, 2**30, 0.0) == copying_s(2**30, 2**30)


@pytest.mark.parametrize(
    ("size_bytes", "step_s", "waits_s"),
    [
        (2**30, 200.0, 1.0),
        (2**30, 199.0, 0.0),  # the step is too short for that
        (2**10, 10.0, 0.05),
        (2**10, 9.9, 0.0),
        (0, 100.0, 0.05),  # a stage without gradients has the state before, and says so
    ],
)
def test_a_long_step_waits_for_the_last_copies_of_its_sums(size_bytes: int, step_s: float, waits_s: float) -> None:
    assert last_sums_s(size_bytes, 2**30, step_s) == waits_s


def test_a_copy_may_take_a_tenth_of_a_step_or_a_moment() -> None:
    pace = CopyPace()
    assert not pace.ended(2.9, 30.0)
    assert pace.late == 0
    assert not pace.ended(3.1, 30.0)
    assert pace.late == 1
    assert not pace.ended(SHORT_S, 0.01)
    assert pace.late == 0


def test_copies_that_are_always_late_become_rare_and_are_told_of_once() -> None:
    pace, told, begun = CopyPace(), 0, []
    for step in range(400):
        if pace.begins():
            begun.append(step)
            told += pace.ended(None, 1.0)
    gaps = [later - sooner for sooner, later in pairwise(begun)]
    assert gaps[:6] == [1, 1, 3, 5, 9, 17]
    assert set(gaps[6:]) <= {33, 65}
    assert told == 1


def test_a_copy_in_time_makes_every_step_have_one_again() -> None:
    pace = CopyPace()
    for _ in range(5):
        pace.ended(None, 1.0)
    while not pace.begins():
        pass
    pace.ended(0.1, 1.0)
    assert [pace.begins() for _ in range(3)] == [True] * 3


def test_copies_of_sums_divide_a_step_equally_every_few_seconds() -> None:
    assert sums_pace(9.9, 10**6, 0.01) == SumsPace(0, 5.0), "there is less than one in its middle"
    assert sums_pace(10.0, 10**6, 0.01) == SumsPace(1, 5.0)
    assert sums_pace(24.0, 10**6, 0.01) == SumsPace(3, 6.0)
    assert sums_pace(24.0, 0, 0.0) == SumsPace(3, 6.0)


def test_copies_of_sums_take_little_of_the_time() -> None:
    assert sums_pace(99.0, 10**10, 2.0) == SumsPace(0, 100.0)
    assert sums_pace(300.0, 10**10, 2.0) == SumsPace(3, 75.0), "processors that are slower than those measured"
    assert sums_pace(-1.0, 10**10, 2.0) == SumsPace(0, 100.0), "the step takes longer than was thought"


def test_copies_over_a_slow_link_are_not_rarer_than_their_processor_time_asks_for() -> None:
    """A stage of 250 million parameters over 2 Gb/s: eight seconds under way, of which two are work."""
    size_bytes = 10**9
    round_s = copying_s(size_bytes, 0.25e9)
    assert round_s == pytest.approx(8.0)
    step_s = 4.5 * PROCESSOR_S_PER_BYTE * size_bytes / 0.02
    assert sums_pace(step_s, size_bytes, round_s) == SumsPace(4, step_s / 5)


def test_copies_of_sums_never_take_more_than_half_of_the_time() -> None:
    size_bytes = 10**9
    round_s = copying_s(size_bytes, 0.01e9)
    pace = sums_pace(1000.0, size_bytes, round_s)
    assert pace == SumsPace(1, 500.0)
    assert sums_pause_s(pace, round_s) == pytest.approx(300.0)
    assert sums_pause_s(pace, 2 * round_s) == pytest.approx(400.0), "the link is slower than it was"
