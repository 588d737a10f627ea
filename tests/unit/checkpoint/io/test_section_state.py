"""A section's state survives its way over the wire bit for bit, or is refused."""

import json
import math
from contextlib import suppress

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.checkpoint.io import section_state
from varuna.checkpoint.io.section_state import JSON, SectionState, from_bytes, to_bytes
from varuna.core.errors import CheckpointError

DTYPES = list(section_state.DTYPE_NAMES)


def tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bit pattern, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


tensors = st.builds(tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32))
scalars: st.SearchStrategy[JSON] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
states = st.builds(
    SectionState,
    st.integers(0, 9999),
    st.dictionaries(st.text(min_size=1).map("parameters/{}".format), tensors, max_size=5),
    st.dictionaries(st.text(), scalars, max_size=4),
)


def state(section: int = 3) -> SectionState:
    weight = torch.randn(5, 4)
    return SectionState(
        section,
        {
            "parameters/h.weight": weight,
            "optimizer/h.weight/exp_avg": weight.bfloat16(),
            "optimizer/h.weight/step": torch.tensor(7.0),
        },
        {"optimizer/h.weight/lr": 0.1},
    )


@given(states)
def test_a_state_survives_bit_for_bit(before: SectionState) -> None:
    after = from_bytes(to_bytes(before))
    assert after.section == before.section
    assert after.tensors.keys() == before.tensors.keys()
    assert all(same_bits(after.tensors[name], value) for name, value in before.tensors.items())
    texts = [json.dumps(state.scalars, sort_keys=True) for state in (before, after)]  # NaN does not equal itself
    assert texts[0] == texts[1]


@given(states)
def test_the_safetensors_library_reads_what_we_write(before: SectionState) -> None:
    after = safetensors.torch.load(to_bytes(before))
    assert all(same_bits(after[name], value) for name, value in before.tensors.items())


def test_every_dtype_that_torch_and_safetensors_share_is_known() -> None:
    library = {torch_dtype: name for name, torch_dtype in safetensors.torch._TYPES.items()}
    ours = dict(section_state.DTYPE_NAMES)
    odd = {dtype for dtype in library if dtype not in ours}
    assert {dtype: name for dtype, name in library.items() if dtype in ours} == ours
    assert odd <= {getattr(torch, "float8_e8m0fnu", None), getattr(torch, "float4_e2m1fn_x2", None)}


def test_views_and_conjugates_are_saved_as_seen() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    odd = {"parameters/t": base.T[1:, ::2], "parameters/c": base.conj(), "parameters/n": base.conj().imag}
    after = from_bytes(to_bytes(SectionState(0, odd)))
    assert all(torch.equal(after.tensors[name], value) for name, value in odd.items())


def test_tensors_are_aligned_within_the_file() -> None:
    mixed = {f"parameters/{d}": torch.ones(3, dtype=d) for d in (torch.bool, torch.float64, torch.int16)}
    data = to_bytes(SectionState(0, mixed))
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % 8 == 0
    assert data[header : header + 24] == torch.ones(3, dtype=torch.float64).numpy().tobytes()


def test_equal_states_give_equal_bytes_whatever_the_order_of_names() -> None:
    one = state()
    other = SectionState(3, dict(reversed(one.tensors.items())), dict(one.scalars))
    assert to_bytes(one) == to_bytes(other)


def test_restored_tensors_can_be_written_to() -> None:
    after = from_bytes(to_bytes(state()))
    for value in after.tensors.values():
        value.add_(1)


def test_a_dtype_without_a_place_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"parameters/x of section 4 is torch.complex128"):
        to_bytes(SectionState(4, {"parameters/x": torch.zeros(1, dtype=torch.complex128)}))


def test_a_scalar_that_is_no_json_is_refused() -> None:
    with pytest.raises(CheckpointError, match="section 4 are not JSON"):
        to_bytes(SectionState(4, {}, {"x": object()}))  # type: ignore[dict-item]


def test_a_foreign_safetensors_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not the state of a section"):
        from_bytes(safetensors.torch.save({"x": torch.ones(1)}))


@given(st.data())
def test_damaged_bytes_are_refused_or_read_but_never_crash(data: st.DataObject) -> None:
    raw = bytearray(to_bytes(SectionState(1, {"parameters/a": torch.ones(2)}, {"s": 1})))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        with suppress(CheckpointError):
            from_bytes(damaged)
