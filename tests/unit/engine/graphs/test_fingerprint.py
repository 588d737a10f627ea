"""Tensors that differ in a bit have other fingerprints; what lies elsewhere in memory has the same."""

import pytest
import torch
from torch import Tensor

from varuna.engine.graphs.fingerprint import fingerprint

LONG = (1 << 18) + 5
"""More than is looked at together."""
FRACTIONS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
KINDS = [*FRACTIONS, torch.int64, torch.int8, torch.bool]


def values(kind: torch.dtype, *shape: int) -> Tensor:
    drawn = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(3))
    half = 0.5 + 0.5j if kind.is_complex else 0.5
    return (drawn + half if kind in FRACTIONS else drawn).to(kind)


def flipped(value: Tensor, bit: int) -> Tensor:
    """One bit is another one."""
    octets = value.clone().reshape(-1).view(torch.uint8)
    octets[bit // 8] ^= 1 << bit % 8
    return octets.view(value.dtype).view(value.shape)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_bit_counts(kind: torch.dtype) -> None:
    value = values(kind, 3, 5)
    seen = {int(fingerprint(value))}
    bits = range(0, 8 * value.nbytes, 8) if kind is torch.bool else range(8 * value.nbytes)
    seen |= {int(fingerprint(flipped(value, bit))) for bit in bits}
    assert len(seen) == 1 + len(bits)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equal_values_are_equal_wherever_they_lie(kind: torch.dtype) -> None:
    value = values(kind, 7, LONG // 7)
    elsewhere = torch.stack([value, value], dim=-1)[..., 1]
    assert not elsewhere.is_contiguous()
    assert torch.equal(fingerprint(value), fingerprint(elsewhere))
    assert not torch.equal(fingerprint(value), fingerprint(value.flip(1)))


def test_two_numbers_with_other_signs_or_each_in_the_place_of_the_other_are_seen() -> None:
    value = values(torch.float32, LONG)
    at = [(0, 1), (0, 2), (3, LONG - 1), (LONG - 2, LONG - 1), (7, 7 + (1 << 17))]
    seen = {int(fingerprint(value))}
    for one, other in at:
        negative, swapped = value.clone(), value.clone()
        negative[[one, other]] *= -1
        swapped[one], swapped[other] = value[other] + 20, value[one] + 20
        back = swapped.clone()
        back[[one, other]] = swapped[[other, one]]
        seen |= {int(fingerprint(each)) for each in (negative, swapped, back)}
    assert len(seen) == 1 + 3 * len(at)


def test_zero_has_no_sign_and_nothing_has_a_fingerprint() -> None:
    assert torch.equal(fingerprint(torch.tensor([0.0, 1.0])), fingerprint(torch.tensor([-0.0, 1.0])))
    assert int(fingerprint(torch.empty(0))) == 0
    assert int(fingerprint(torch.tensor(2.0))) != 0
