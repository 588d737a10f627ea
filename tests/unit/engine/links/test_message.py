"""A cut's tensors survive the wire bit for bit, whatever their dtypes, shapes and number of examples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from varuna.engine.links.message import Layout
from varuna.partition.cut.split import Crossing

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]

dimension = st.one_of(st.tuples(st.integers(0, 5), st.just(0)), st.tuples(st.integers(0, 2), st.integers(1, 3)))
parts = st.tuples(st.sampled_from(DTYPES), st.lists(dimension, max_size=3), st.booleans())


def crossings_of(drawn: list[tuple[torch.dtype, list[tuple[int, int]], bool]]) -> tuple[Crossing, ...]:
    return tuple(
        Crossing(f"c{number}", dtype, tuple(f for f, _ in shape), tuple(p for _, p in shape), differentiable)
        for number, (dtype, shape, differentiable) in enumerate(drawn)
    )


def random_bits(crossing: Crossing, examples: int, seed: int) -> Tensor:
    """Any bits of the dtype, NaNs among them; bools are 0 or 1."""
    shape = torch.Size(crossing.shape(examples))
    generator = torch.Generator().manual_seed(seed)
    high = 2 if crossing.dtype is torch.bool else 256
    size = (shape.numel() * crossing.dtype.itemsize,)
    raw = torch.randint(0, high, size, generator=generator, dtype=torch.int64).to(torch.uint8)
    return raw.view(crossing.dtype).view(shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


@settings(max_examples=80, deadline=None)
@given(st.lists(parts, max_size=5), st.integers(1, 7), st.data())
def test_values_and_digests_come_back_bit_for_bit(
    drawn: list[tuple[torch.dtype, list[tuple[int, int]], bool]], examples: int, data: st.DataObject
) -> None:
    layout = Layout(crossings_of(drawn), examples, digests=True)
    values = {c.name: random_bits(c, examples, number) for number, c in enumerate(layout.crossings)}
    signed = st.integers(-(2**63), 2**63 - 1)
    digests = data.draw(st.lists(signed, min_size=examples, max_size=examples))
    buffer = layout.pack(values, digests).whole()
    assert (buffer.dtype, buffer.numel()) == (torch.uint8, layout.size_bytes)
    found = layout.unpack(buffer.clone())
    assert list(found) == [c.name for c in layout.crossings]
    assert all(same_bits(found[name], value) for name, value in values.items())
    assert layout.digests_of(buffer) == digests


@given(st.lists(parts, max_size=5), st.integers(1, 7))
def test_tensors_are_aligned_and_do_not_overlap(
    drawn: list[tuple[torch.dtype, list[tuple[int, int]], bool]], examples: int
) -> None:
    layout = Layout(crossings_of(drawn), examples, digests=True)
    offsets = layout.offsets_bytes
    assert all(offset % 64 == 0 for offset in offsets[:-1])
    for crossing, begin, end in zip(layout.crossings, offsets, offsets[1:], strict=False):
        assert begin + torch.Size(crossing.shape(examples)).numel() * crossing.dtype.itemsize <= end


HIDDEN = Crossing("hidden", torch.bfloat16, (0, 3), (1, 0), differentiable=True)
MASK = Crossing("mask", torch.bool, (0,), (1,), differentiable=False)


def test_a_missing_gradient_travels_as_zeros() -> None:
    layout = Layout((HIDDEN, MASK), 2, digests=False)
    found = layout.unpack(layout.pack({"mask": torch.tensor([True, False])}).whole())
    assert found["hidden"].tolist() == [[0.0] * 3] * 2
    assert found["mask"].tolist() == [True, False]


def test_a_short_micro_batch_has_a_layout_of_its_own() -> None:
    whole, short = (Layout((HIDDEN, MASK), examples, digests=True) for examples in (64, 1))
    assert short.size_bytes < whole.size_bytes
    values = {"hidden": torch.ones(1, 3, dtype=torch.bfloat16), "mask": torch.tensor([True])}
    assert short.unpack(short.pack(values, [-1]).whole())["hidden"].shape == (1, 3)
    assert short.digests_of(short.pack(values, [-1]).whole()) == [-1]


def test_a_sender_that_reads_no_inputs_sends_digests_of_zero() -> None:
    layout = Layout((), 3, digests=True)
    assert layout.digests_of(layout.pack({}).whole()) == [0, 0, 0]


def test_no_message_is_empty() -> None:
    assert Layout((), 3, digests=False).size_bytes > 0
    assert Layout((), 3, digests=False).pack({}).whole().numel() > 0


def test_values_of_any_strides_are_packed_in_their_logical_order() -> None:
    crossing = Crossing("x", torch.float32, (2, 3), (0, 0), differentiable=True)
    layout = Layout((crossing,), 1, digests=False)
    value = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(layout.unpack(layout.pack({"x": value}).whole())["x"], value)


def test_digests_that_do_not_match_the_examples_are_no_message() -> None:
    with pytest.raises(RuntimeError):
        Layout((MASK,), 3, digests=True).pack({}, [1, 2])
