"""Results of an evaluation, as bytes and back: numbers, text, and arrays in tuples, lists and dicts."""

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAY, _TUPLE = "__array__", "__tuple__"


def pack(value: Any) -> bytes:
    """Any nesting of dicts, lists, tuples, arrays, numbers and text; tuples with names lose them."""
    arrays: list[np.ndarray[Any, Any]] = []

    def plain(each: Any) -> Any:
        if isinstance(each, np.ndarray):
            arrays.append(each)
            return {_ARRAY: len(arrays) - 1}
        if isinstance(each, Mapping):
            return {key: plain(item) for key, item in each.items()}
        if isinstance(each, tuple):
            return {_TUPLE: [plain(item) for item in each]}
        if isinstance(each, list):
            return [plain(item) for item in each]
        return each.item() if isinstance(each, np.generic) else each

    tree = json.dumps(plain(value))
    written = io.BytesIO()
    np.savez(written, tree=np.array(tree), allow_pickle=False, **{f"a{i}": each for i, each in enumerate(arrays)})
    return written.getvalue()


def unpack(data: bytes) -> Any:
    """Return the value that was packed."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:

        def original(each: Any) -> Any:
            if isinstance(each, dict):
                if _ARRAY in each:
                    return stored[f"a{each[_ARRAY]}"]
                if _TUPLE in each:
                    return tuple(map(original, each[_TUPLE]))
                return {key: original(item) for key, item in each.items()}
            return list(map(original, each)) if isinstance(each, list) else each

        return original(json.loads(str(stored["tree"])))
