"""A stage's state crosses in parts of any size, bit for bit."""

import math

import pytest
import torch

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import CheckpointError
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes, from_bytes


def states() -> dict[int, SectionState]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        3: SectionState(
            3,
            {
                "parameters/a": drawn(7, 5).t(),  # not contiguous
                "parameters/b": drawn(3).to(torch.bfloat16),
                "parameters/none": torch.empty(0, 4),
                "optimizer/a/step": torch.tensor(4.0),
                "buffers/seen": torch.tensor([True, False, True]),
                "buffers/count": torch.tensor(2**40),
            },
            {"run/loss_scale": [65536.0, 3], "optimizer/a/beta": math.nan},
        ),
        4: SectionState(4, {"parameters/c": torch.view_as_complex(drawn(6, 2)).conj()}, {}),
        5: SectionState(5, {}, {}),
    }


@pytest.mark.parametrize("part_bytes", [8, 24, 64, 1000, 10_000])
def test_a_copy_has_the_same_bits(part_bytes: int) -> None:
    given = states()
    layouts = [SectionLayout.of(given[section]) for section in given]
    body = Body.of_states(layouts, given)
    known = from_bytes(as_bytes(layouts))
    memories = [torch.full((layout.size_bytes,), 171, dtype=torch.uint8) for layout in known]
    there = Body.of_memory(memories)
    assert there.size_bytes == body.size_bytes
    for first in range(0, body.size_bytes, part_bytes):
        part = torch.full((part_bytes,), 205, dtype=torch.uint8)
        body.read(first, part)
        there.write(first, part)
    for layout, memory in zip(known, memories, strict=True):
        found, expected = layout.state_in(memory), given[layout.section]
        assert found.tensors.keys() == expected.tensors.keys()
        for name, value in expected.tensors.items():
            assert found.tensors[name].dtype is value.dtype
            assert torch.equal(found.tensors[name], value.resolve_conj()), name
        assert repr(found.scalars) == repr(expected.scalars)


def test_a_tensor_of_another_kind_is_refused() -> None:
    state = SectionState(0, {"parameters/q": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"parameters/q of section 0 is .*complex128, which cannot be copied"):
        SectionLayout.of(state)
