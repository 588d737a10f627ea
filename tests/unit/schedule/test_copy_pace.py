"""The speed of copies, and the time between them."""

import pytest

from varuna.schedule.copy_pace import (
    CHECKPOINT_S,
    CHECKPOINT_SHARE,
    LONGEST_PAUSE_S,
    PROCESSOR_S_PER_BYTE,
    SumsPace,
    checkpoint_every_s,
    checkpoint_stall_s,
    copying_s,
    pause_s,
    state_copying_s,
    state_pause_s,
    sums_pace,
    sums_pause_s,
)


def test_copies_take_half_of_a_links_time_and_never_pause_for_long() -> None:
    assert pause_s(0.004) == pytest.approx(0.004)
    assert pause_s(60.0) == LONGEST_PAUSE_S


def test_a_states_copy_makes_haste_for_a_twentieth_of_the_time_to_the_next() -> None:
    assert state_pause_s(0.004, 4.9, 100.0) == 0.0
    assert state_pause_s(0.004, 5.1, 100.0) == pause_s(0.004)
    assert state_copying_s(2**30, 2**30, 100.0) == pytest.approx(1.0), "at once"
    assert state_copying_s(6 * 2**30, 2**30, 100.0) == pytest.approx(5.0 + 2.0), "the last sixth with pauses"
    assert state_copying_s(2**30, 2**30, 0.0) == copying_s(2**30, 2**30)


def test_a_memory_checkpoint_takes_a_hundredth_of_the_time_or_less_than_losses_undo() -> None:
    gb = 10**9
    cost_s = CHECKPOINT_S + 0.2
    seldom = checkpoint_every_s(gb, 0.2, on_device=True, losses_per_hour=0.0)
    assert seldom == pytest.approx(cost_s / CHECKPOINT_SHARE)
    on_processors = checkpoint_every_s(gb, 0.2, on_device=False, losses_per_hour=0.0)
    assert on_processors == pytest.approx((cost_s + PROCESSOR_S_PER_BYTE * gb) / CHECKPOINT_SHARE)
    assert checkpoint_every_s(gb, 0.2, on_device=True, losses_per_hour=60.0) < seldom
    assert checkpoint_every_s(gb, 0.2, on_device=True, losses_per_hour=1e-3) == seldom


def test_beside_a_device_training_stops_for_what_a_step_does_not_hide() -> None:
    assert checkpoint_stall_s(2.0, 60.0, on_device=False) == 2.0
    assert checkpoint_stall_s(2.0, 60.0, on_device=True) == 0.0
    assert checkpoint_stall_s(2.0, 0.5, on_device=True) == 1.5


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
