"""Numbers as fewer bytes, and back without a changed bit.

Exponents of activations, gradients and weights are much alike, and mantissas are noise. So the bytes of a part are
sorted by their place within a number; the last ones, with sign and exponent, are Huffman-coded (by zlib, without a
search for repetitions: there are none), and the others stay as they are::

    part      a b A   c d A   e f B       numbers of three bytes, the last of which is coded
    encoded   header  code of A A B   a c e  b d f

A part says itself what was done to it, so its receiver needs no dtype, and it carries a checksum of what comes out.
Bytes that no whole number fills stay as they are.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 2**18
"""Of the numbers in a part: while one is on its way, the next one is encoded, or the one before decoded."""
_HEADER = struct.Struct("<IIIBB")
HEADER_BYTES = _HEADER.size
_WIDEST = 8

Pieces = list[bytes | memoryview]
"""A header, and all that follows it."""
_Bytes = NDArray[np.uint8]


class Damaged(Exception):
    """Error: a part is not as it was encoded."""


class Form(NamedTuple):
    """The form in which parts of a kind of message are encoded."""

    number_bytes: int
    coded_bytes: int
    """of each number: the last ones. 0: the part is as it was"""


PLAIN = Form(1, 0)
FORMS = (Form(2, 1), Form(4, 1), Form(8, 2), Form(1, 1))
"""For bf16 and fp16, fp32, fp64, and whole numbers or text."""


class Header(NamedTuple):
    """The header in front of a part."""

    size_bytes: int
    """of what comes out"""
    code_bytes: int
    """of the code, which comes first; the rest follows"""
    checksum: int
    form: Form

    @property
    def numbers(self) -> int:
        """Whole numbers in the part."""
        return self.size_bytes // self.form.number_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes of all that follows the header."""
        return self.code_bytes + self.size_bytes - self.numbers * self.form.coded_bytes


class Codec:
    """Encodes and decodes parts, one at a time, in memory of its own."""

    def __init__(self) -> None:
        self._planes = np.empty(PART_BYTES, np.uint8)

    def encode(self, part: memoryview, form: Form) -> Pieces:
        """Return the header and all that follows it, in pieces that hold until the next call."""
        numbers = len(part) // form.number_bytes
        numbers_bytes = numbers * form.number_bytes
        checksum = zlib.crc32(part)
        if not form.coded_bytes or not numbers:
            return [_HEADER.pack(len(part), 0, checksum, *PLAIN), part]
        planes = self._sorted(part[:numbers_bytes], form)
        rest_bytes = numbers_bytes - numbers * form.coded_bytes
        coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL + 1, zlib.Z_HUFFMAN_ONLY)
        code = coder.compress(planes[rest_bytes:]) + coder.flush()
        # Noise, or numbers of another kind than was tried: the code would be longer.
        if len(code) >= numbers_bytes - rest_bytes:
            return [_HEADER.pack(len(part), 0, checksum, *PLAIN), part]
        header = _HEADER.pack(len(part), len(code), checksum, *form)
        return [header, code, planes[:rest_bytes], part[numbers_bytes:]]

    def decode(self, header: Header, body: memoryview, into: memoryview) -> None:
        """Undo ``encode``; ``into`` is as long as what comes out.

        Raises:
            Damaged: the bytes are not those that were encoded.
        """
        form, numbers = header.form, header.numbers
        if not form.coded_bytes:
            into[:] = body
        else:
            code, rest = body[: header.code_bytes], body[header.code_bytes :]
            coded = _decompressed(code, numbers * form.coded_bytes)
            rows = np.frombuffer(into, np.uint8)[: numbers * form.number_bytes].reshape(numbers, form.number_bytes)
            rest_bytes = numbers * (form.number_bytes - form.coded_bytes)
            for place, plane in enumerate(_planes(rest[:rest_bytes], numbers) + _planes(coded, numbers)):
                rows[:, place] = plane
            into[numbers * form.number_bytes :] = rest[rest_bytes:]
        check(header, into)

    def _sorted(self, part: memoryview, form: Form) -> memoryview:
        """Sort the bytes of whole numbers by their place in a number."""
        if form.number_bytes == 1:
            return part
        rows = np.frombuffer(part, np.uint8).reshape(-1, form.number_bytes)
        planes = self._planes[: len(part)].reshape(form.number_bytes, -1)
        for place in range(form.number_bytes):
            planes[place] = rows[:, place]
        return self._planes[: len(part)].data


def read_header(header: bytes | bytearray | memoryview, most_bytes: int) -> Header:
    """Read what is in front of a part, of which ``most_bytes`` may come out.

    Raises:
        Damaged: no part begins so.
    """
    size_bytes, code_bytes, checksum, number_bytes, coded_bytes = _HEADER.unpack(header)
    read = Header(size_bytes, code_bytes, checksum, Form(number_bytes, coded_bytes))
    is_form = 1 <= number_bytes <= _WIDEST and coded_bytes <= number_bytes
    if not is_form or not 0 < size_bytes <= min(most_bytes, PART_BYTES) or code_bytes > read.numbers * coded_bytes:
        raise Damaged(f"a compressed part begins with {bytes(header).hex()}, which is no header")
    return read


def check(header: Header, came: memoryview) -> None:
    """Compare what came out with the checksum.

    Raises:
        Damaged: they differ.
    """
    if (found := zlib.crc32(came)) != header.checksum:
        raise Damaged(f"a compressed part of {len(came)} bytes has checksum {found:08x}, not {header.checksum:08x}")


def _decompressed(code: memoryview, size_bytes: int) -> bytes:
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than there should be: too much shows, and no peer can fill this memory.
        found = decoder.decompress(code, size_bytes + 1)
    except zlib.error as error:
        raise Damaged(f"a compressed part cannot be decompressed: {error}") from error
    if len(found) != size_bytes or not decoder.eof or decoder.unused_data:
        raise Damaged(f"a compressed part gives {len(found)} bytes where {size_bytes} were encoded")
    return found


def _planes(view: bytes | memoryview, numbers: int) -> list[_Bytes]:
    return list(np.frombuffer(view, np.uint8).reshape(-1, numbers)) if len(view) else []
