"""What a dataset holds that two processes cannot share: open files, connections, locks, threads.

Exactly that cannot be pickled. So the dataset is walked as if it were pickled, but nothing is copied, and functions are
walked into, wherever they were defined.
"""

import io
import mmap
import pickle
import threading
import time
import types
from typing import Any

import numpy as np
from torch import Tensor

_WALK_S = 0.5
_SAFE = (type, types.ModuleType, types.BuiltinFunctionType, Tensor, mmap.mmap, threading.local)


def unshareable(held: object) -> str | None:
    """The first such thing that ``held`` holds, in words; None: nothing was found within half a second."""
    sink = _Sink()
    try:
        _Walk(sink).dump(held)
    except _Enough:
        return None
    except pickle.PicklingError:
        return None  # something has no name of its own: not a handle
    except Exception as error:  # noqa: BLE001 - whatever a user's class does
        return str(error).removeprefix("cannot pickle ") or type(error).__name__
    return None


class _Enough(Exception):
    """Walked for long enough."""


class _Sink(io.RawIOBase):
    """Takes bytes for a while."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + _WALK_S

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if time.monotonic() > self._until_s:
            raise _Enough
        return len(data)


class _Walk(pickle.Pickler):
    """Pickles into nothing, large blocks left out."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, protocol=5, buffer_callback=lambda _: False)

    def reducer_override(self, obj: Any) -> Any:
        if obj is _nothing:
            return NotImplemented
        if isinstance(obj, _SAFE) or (isinstance(obj, np.ndarray) and obj.dtype != object):
            return _nothing, ()
        if isinstance(obj, types.FunctionType):
            return _nothing, (_closure(obj), obj.__defaults__, obj.__kwdefaults__)
        return NotImplemented


def _nothing(*_: object) -> None:
    """Stands for what is safe, and for functions."""


def _closure(function: types.FunctionType) -> list[object]:
    found = list[object]()
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet set
            continue
    return found
