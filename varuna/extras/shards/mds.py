"""Shards as MosaicML's ``MDSWriter`` writes them (MDS, version 2), read without its library; nothing is unpickled.

A shard is one file; numbers are little-endian unsigned 32-bit::

    samples, samples + 1 offsets from the file's beginning, a description that index.json has as well, then the samples

A sample has the sizes of its columns, but for those of fixed size, and then their values.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from varuna.core.errors import DataError

WORD_BYTES = 4
INDEX = "index.json"
_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
_BY_NUMBER = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32"} | {
    34: "float32", 64: "uint64", 65: "int64", 66: "float64"
}  # fmt: skip
_IMAGES = ("jpeg", "png")

Decode = Callable[[bytes], Any]


@dataclass(frozen=True)
class StoredFile:
    """A file of a shard, as index.json describes it."""

    name: str
    size_bytes: int
    hashes: Mapping[str, str]
    """hexadecimal digests, by algorithm"""


@dataclass(frozen=True)
class Shard:
    """One shard."""

    samples: int
    raw: StoredFile
    packed: StoredFile | None
    """the compressed file that is stored in its place, if any"""
    compression: str
    columns: tuple[tuple[str, str, int | None], ...]
    """name, encoding, and size in bytes where it is fixed"""


def shards_of(index: bytes, where: str) -> tuple[Shard, ...]:
    """Return the shards that an index.json lists.

    Args:
        index: its content.
        where: it lies, for messages.

    Raises:
        DataError: it is not the index of a data set that can be read.
    """
    try:
        listed = [_shard(each) for each in json.loads(index)["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{where} is not an index of MDS shards ({type(error).__name__}: {error}). MosaicML's MDSWriter writes one "
            "beside its shards."
        ) from error
    for shard in listed:
        for name, encoding, _ in shard.columns:
            if (decode := decoder(encoding)) is None:
                raise DataError(
                    f"column {name!r} of {where} is encoded as {encoding!r}, which Varuna does not read"
                    + (": it would run code that is stored in the data. " if encoding == "pkl" else ". ")
                    + f"Write it as int, str, bytes, json, ndarray, a number type ({', '.join(_DTYPES)}), jpeg or png."
                )
            del decode
    if not any(shard.samples for shard in listed):
        raise DataError(f"{where} lists no samples")
    return tuple(shard for shard in listed if shard.samples)


def _shard(given: Mapping[str, Any]) -> Shard:
    if given["version"] != 2 or given["format"] != "mds":
        raise ValueError(f"format {given['format']}, version {given['version']}; needed: mds, 2")
    packed = given.get("zip_data")
    columns = zip(given["column_names"], given["column_encodings"], given["column_sizes"], strict=True)
    return Shard(
        int(given["samples"]),
        _file(given["raw_data"]),
        None if packed is None else _file(packed),
        given.get("compression") or "",
        tuple(columns),
    )


def _file(given: Mapping[str, Any]) -> StoredFile:
    name = str(given["basename"])
    if "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is not the name of a shard")  # a copy would lie elsewhere
    return StoredFile(name, int(given["bytes"]), dict(given.get("hashes") or {}))


def sample_of(shard: Shard, data: bytes) -> dict[str, Any]:
    """Return the columns of a sample.

    Raises:
        ValueError: the bytes are damaged.
    """
    # sizes of the columns that have no fixed one stand first, 4 bytes each; then all values, in the columns' order
    found, place = dict[str, Any](), WORD_BYTES * sum(not size for _, _, size in shard.columns)
    words = iter(np.frombuffer(data[:place], "<u4").tolist())
    for name, encoding, fixed in shard.columns:
        size, decode = fixed or next(words), decoder(encoding)
        if place + size > len(data) or decode is None:
            raise ValueError(f"column {name!r} reaches beyond the sample")
        found[name] = decode(data[place : place + size])
        place += size
    return found


def decoder(encoding: str) -> Decode | None:
    """Return what reads values of an encoding; None: it cannot be read."""
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        return lambda data: _array(data, *details.partition(":")[::2])
    if kind in _DTYPES:
        return lambda data: np.frombuffer(data, np.dtype(kind).newbyteorder("<"))[0]
    return _image if kind in _IMAGES else _SIMPLE.get(kind)


_SIMPLE: dict[str, Decode] = {
    "bytes": bytes,
    "str": lambda data: data.decode(),
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "json": lambda data: json.loads(data),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
}


def _array(data: bytes, dtype: str, shape: str) -> np.ndarray[Any, Any]:
    """Read an array; what the encoding does not say of dtype and shape stands before its values."""
    place = 0
    if not dtype:
        dtype, place = _BY_NUMBER[data[0]], 1
    if shape:
        sizes = [int(each) for each in shape.split(",")]
    else:
        # one byte: the number of dimensions above two bits that say how wide each of their sizes is
        count, bytes_each = data[place] >> 2, 1 << (data[place] & 3)
        end = place + 1 + count * bytes_each
        sizes = np.frombuffer(data[place + 1 : end], f"<u{bytes_each}").tolist()
        place = end
    return np.frombuffer(data[place:], np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(sizes)


def _image(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("these shards have images, for which Pillow is needed: pip install pillow") from error
    return Image.open(io.BytesIO(data))
