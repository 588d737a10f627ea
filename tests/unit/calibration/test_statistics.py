import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.calibration.statistics import FittedLine, best_size, fit_line, mean_time, quantiles, spread


def test_a_line_is_found_through_wild_points() -> None:
    points = [(x, 3.0 + 2.0 * x) for x in (0, 1, 2, 4, 8, 16)]
    assert fit_line(points) == FittedLine(3.0, 2.0)
    fixed, per_unit = fit_line([*points, (8, 1000.0), (16, 500.0), (16, 35.0), (8, 19.0)])
    assert fixed == pytest.approx(3.0)
    assert per_unit == pytest.approx(2.0)


def test_costs_are_never_negative() -> None:
    assert fit_line([(1, 5.0), (2, 4.0)]) == FittedLine(4.5, 0.0)
    assert fit_line([(1, 1.0), (2, 4.0)]) == FittedLine(0.0, 1.5)
    assert fit_line([(7, 2.0)]) == FittedLine(2.0, 0.0)
    with pytest.raises(ValueError, match="at least one"):
        fit_line([])


def test_a_mean_time_counts_the_tail_and_no_hiccup() -> None:
    assert mean_time([1.0, 1.0, 1.3]) == pytest.approx(1.1)
    assert mean_time([1.0, 1.0, 1.3, 9.0]) == pytest.approx(1.1)
    assert mean_time([4.0]) == 4.0


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e3)), min_size=1, max_size=12))
def test_no_measurement_gives_a_negative_cost(points: list[tuple[float, float]]) -> None:
    line = fit_line(points)
    assert line.fixed >= 0
    assert line.per_unit >= 0


def test_quantiles_interpolate() -> None:
    assert quantiles([4.0, 1.0, 3.0, 2.0, 5.0], (0.0, 0.25, 0.5, 0.9, 1.0)) == (1.0, 2.0, 3.0, 4.6, 5.0)
    assert quantiles([7.0], (0.1, 0.9)) == (7.0, 7.0)
    assert spread([9.0, 10.0, 11.0]) == pytest.approx(0.05)


def test_the_sweep_ends_where_larger_sizes_save_nothing() -> None:
    seconds = {1: 1.0, 2: 1.5, 4: 2.4, 8: 4.8, 16: 9.6, 32: 19.2}
    assert best_size(seconds, seconds.get) == {m: seconds[m] for m in (1, 2, 4, 8, 16)}


def test_one_hiccup_does_not_end_the_sweep() -> None:
    seconds = {1: 1.0, 2: 2.5, 4: 2.4, 8: 4.0, 16: 8.0, 32: 16.0}
    assert list(best_size(seconds, seconds.get)) == [1, 2, 4, 8, 16, 32]


def test_the_sweep_ends_where_memory_does() -> None:
    assert best_size([1, 2, 4, 8], lambda m: m * 1.0 if m < 4 else None) == {1: 1.0, 2: 2.0}
