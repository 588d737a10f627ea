"""Micro-batches are dealt in proportion to speed, whole ones, so that no other dealing would end sooner."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.dealing import ends_of_shares, pipeline_speeds

SPEEDS = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4).map(lambda found: tuple(sorted(found, reverse=True)))


def shares(micro_batches: int, speeds: tuple[float, ...], stages: int) -> list[int]:
    return [b - a for a, b in pairwise(ends_of_shares(micro_batches, len(speeds), speeds, stages))]


def last_end(dealt: list[int] | tuple[int, ...], speeds: tuple[float, ...], stages: int) -> float:
    return max((count + stages - 1) / speed for count, speed in zip(dealt, speeds, strict=True))


@given(SPEEDS, st.integers(0, 10), st.integers(1, 6))
def test_no_other_dealing_ends_sooner(speeds: tuple[float, ...], more: int, stages: int) -> None:
    micro_batches = len(speeds) + more
    dealt = shares(micro_batches, speeds, stages)
    assert sum(dealt) == micro_batches
    assert min(dealt) >= 1
    assert dealt == sorted(dealt, reverse=True)
    others = (each for each in product(range(1, micro_batches + 1), repeat=len(speeds)) if sum(each) == micro_batches)
    best = min(last_end(each, speeds, stages) for each in others)
    assert last_end(dealt, speeds, stages) == pytest.approx(best)


def test_two_fast_and_four_slow_ones() -> None:
    assert shares(64, (1.0, 1.0, 0.5, 0.5, 0.5, 0.5), 1) == [16, 16, 8, 8, 8, 8]
    assert shares(64, (1.0, 0.5), 4) == [44, 20]  # (44 + 3) / 1 = 47 and (20 + 3) / 0.5 = 46


@given(st.lists(st.tuples(st.floats(0.3, 1.0), st.integers(1, 6)), min_size=1, max_size=4), st.integers(0, 10))
def test_pipelines_of_different_depth_end_together_as_well_as_whole_micro_batches_can(
    kinds: list[tuple[float, int]], more: int
) -> None:
    rates, depths = tuple(rate for rate, _ in kinds), tuple(depth for _, depth in kinds)

    def ends(dealt: list[int] | tuple[int, ...]) -> float:
        return max((count + depth - 1) / rate for count, rate, depth in zip(dealt, rates, depths, strict=True))

    micro_batches = len(kinds) + more
    dealt = [b - a for a, b in pairwise(ends_of_shares(micro_batches, len(kinds), rates, depths))]
    assert sum(dealt) == micro_batches
    assert min(dealt) >= 1
    others = (each for each in product(range(1, micro_batches + 1), repeat=len(kinds)) if sum(each) == micro_batches)
    assert ends(dealt) == pytest.approx(min(map(ends, others)))


@given(SPEEDS, st.integers(0, 3))
def test_with_fewer_micro_batches_than_replicas_the_fastest_run_them(speeds: tuple[float, ...], count: int) -> None:
    count = min(count, len(speeds) - 1)
    dealt = shares(count, speeds, 2)
    assert sum(dealt) == count
    assert dealt == [1] * count + [0] * (len(speeds) - count)


def test_equal_replicas_differ_by_one_at_most() -> None:
    assert ends_of_shares(10, 4, (), 3) == (0, 3, 6, 8, 10)


def test_a_pipeline_is_as_fast_as_its_slowest_worker() -> None:
    def of(speeds: tuple[float, ...], *depths: int) -> tuple[float, ...]:
        return pipeline_speeds({"": speeds}, [[""] * depth for depth in depths])

    assert of((1.0, 1.0, 0.8, 0.5, 0.5), 2, 2) == (1.0, 0.5)
    assert of((1.0, 1.0, 1.0, 0.5), 3) == ()
    assert of((), 3, 3) == ()
    assert of((1.0, 1.0, 0.9, 0.5), 3, 1) == (0.9, 0.5)


def test_pipelines_take_the_fastest_of_their_classes() -> None:
    speeds = {"fat": (1.0, 0.5), "thin": (1.0, 1.0, 0.8)}
    assert pipeline_speeds(speeds, [["fat"], ["fat"], ["thin"]]) == (1.0, 0.5, 1.0)
    assert pipeline_speeds(speeds, [["thin"] * 2, ["thin", "fat"]]) == (1.0, 0.8)
    assert pipeline_speeds(speeds, [["fat", "thin"], ["thin"], ["other"]]) == ()
