"""Numbers as fewer bytes, and back: every bit, for any dtype; and what is not as it was encoded is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.engine.base.codec import FORMS, HEADER_BYTES, PART_BYTES, PLAIN, Codec, Damaged, Form, read_header
from varuna.engine.base.connection import bytes_of

CODEC = Codec()
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)
forms = st.sampled_from((PLAIN, *FORMS, Form(3, 2), Form(8, 8)))


def encoded(given: bytes, form: Form) -> bytes:
    return b"".join(CODEC.encode(memoryview(given), form))


def decoded(sent: bytes, most_bytes: int) -> bytes:
    header = read_header(sent[:HEADER_BYTES], most_bytes)
    assert len(sent) == HEADER_BYTES + header.body_bytes
    into = bytearray(header.size_bytes)
    CODEC.decode(header, memoryview(sent)[HEADER_BYTES:], memoryview(into))
    return bytes(into)


@given(st.binary(min_size=1, max_size=3000), forms)
def test_any_bytes_come_back(given: bytes, form: Form) -> None:
    assert decoded(encoded(given, form), len(given)) == given


@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 700),
    form=forms,
    is_noise=st.booleans(),
)
def test_numbers_of_any_dtype_come_back_with_their_nans(
    seed: int, dtype: torch.dtype, size: int, form: Form, is_noise: bool
) -> None:
    """Noise has every kind of NaN, infinities, denormals and both zeros."""
    chance = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (size * dtype.itemsize,), generator=chance).to(torch.uint8)
    values = noise if is_noise else torch.randn(size, generator=chance).to(dtype)
    sent = bytes(bytes_of(values))
    assert decoded(encoded(sent, form), len(sent)) == sent


def test_exponents_become_shorter_and_noise_never_longer_than_a_header() -> None:
    values = torch.randn(PART_BYTES // 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    sent = bytes(bytes_of(values))
    assert len(sent) / len(encoded(sent, Form(2, 1))) > 1.4
    noise = bytes(torch.randint(0, 256, (PART_BYTES,), generator=torch.Generator().manual_seed(0)).to(torch.uint8))
    for form in FORMS:
        assert len(encoded(noise, form)) <= PART_BYTES + HEADER_BYTES


@given(st.data(), st.binary(min_size=1, max_size=300), forms)
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject, given: bytes, form: Form) -> None:
    sent = bytearray(encoded(given, form))
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    sent[bit // 8] ^= 1 << bit % 8
    try:
        header = read_header(sent[:HEADER_BYTES], len(given))
        body = bytes(sent[HEADER_BYTES:]).ljust(header.body_bytes, b"\0")[: header.body_bytes]
        into = bytearray(header.size_bytes)
        CODEC.decode(header, memoryview(body), memoryview(into))
    except Damaged:
        return
    assert bytes(into) == given, "wrong bytes were taken for right ones"


@pytest.mark.parametrize(
    "header", [b"\0" * HEADER_BYTES, b"\xff" * HEADER_BYTES, encoded(b"too long for its place", PLAIN)[:HEADER_BYTES]]
)
def test_what_is_no_header_is_refused_in_words(header: bytes) -> None:
    with pytest.raises(Damaged, match="which is no header"):
        read_header(header, 8)


def test_damage_is_said_in_words() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    sent = bytearray(encoded(bytes(bytes_of(values)), Form(2, 1)))
    header = read_header(sent[:HEADER_BYTES], 8192)
    for at, said in ((-1, "has checksum"), (HEADER_BYTES, "cannot be decompressed|bytes where|has checksum")):
        hurt = bytearray(sent)
        hurt[at] ^= 0xFF
        with pytest.raises(Damaged, match=said):
            CODEC.decode(header, memoryview(hurt)[HEADER_BYTES:], memoryview(bytearray(8192)))
