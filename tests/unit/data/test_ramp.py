"""Steps of different numbers of samples: which positions have some, and what a micro-batch without any is."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.errors import UsageError
from varuna.data.order import sample_index
from varuna.data.ramp import Ramp
from varuna.data.samples import SampleSource
from varuna.data.sizes import samples_in

SIZES = [1, 3, 4, 2, 4]


def ramp() -> Ramp:
    return Ramp(SIZES.__getitem__, 4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_each_place_of_the_order_is_at_one_position_and_in_order(sizes: list[int]) -> None:
    found = Ramp(sizes.__getitem__, 5)
    places = [found.place(position) for position in range(5 * len(sizes))]
    assert [place for place in places if place is not None] == list(range(sum(sizes)))
    for step, size in enumerate(sizes):
        assert [place is not None for place in places[5 * step : 5 * step + 5]] == [True] * size + [False] * (5 - size)
        assert (found.before(step), found.size(step)) == (sum(sizes[:step]), size)


def test_how_many_steps_have_so_many_samples() -> None:
    assert [ramp().steps_for(Fraction(samples)) for samples in (0, 1, 4, 5, 10)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [0, 5, -1, 2.0, None, "3"])
def test_what_is_no_size_is_refused_with_its_step(size: Any) -> None:
    sizes: Callable[[int], Any] = lambda step: 3 if step < 2 else size  # noqa: E731
    with pytest.raises(UsageError, match=r"batch_ramp= returned .* for step 2.*from 1 to global_batch=4"):
        Ramp(sizes, 4).before(3)


def test_a_micro_batch_has_the_samples_that_are_there_or_one_that_counts_nothing() -> None:
    dataset = [{"x": torch.tensor(float(index))} for index in range(7)]
    source = SampleSource(dataset, seed=0, ramp=ramp(), step_at=lambda position: position // 4)
    at = 0
    for step, size in enumerate(SIZES):
        expected = [float(sample_index(at + place, size=7, seed=0)) for place in range(size)]
        for first in (0, 2):
            found = source.micro_batch(range(4 * step + first, 4 * step + first + 2))
            here = expected[first : first + 2]
            assert found.tensors["x"].tolist() == (here or expected[:1])
            assert samples_in(found.tensors) == len(here)
            assert len(found.digests) == len(found.indices) == 2
        at += size
    assert source.may_miss
