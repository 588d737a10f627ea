"""Python's ``len`` and ``hash`` of a number of samples that is not known yet.

Both want one number, and Python looks them up in places that the whole process shares. What stands there while a model
is exported does something new for the threads that export only, and only for what export could not follow; what was
there comes back once the last of them is done.
"""

import builtins
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from varuna.partition.opaque.each_sample import AllSamples, number_listed
from varuna.partition.watching.own_code import OWN, TORCH

_len = builtins.len
_hash = torch.SymInt.__hash__
_attempts = itertools.count(1)


class _Shared:
    """A function of the whole process that is another one for some threads."""

    def __init__(self, place: Callable[[], None], take_away: Callable[[], None]) -> None:
        self._place, self._take_away = place, take_away
        self._lock = threading.Lock()  # the first export of any thread places the function, the last takes it away
        self._attempts: dict[int, list[int]] = {}  # of each thread, the innermost last

    @property
    def attempt(self) -> int | None:
        """Number of the export that this thread makes; None: it makes none."""
        found = self._attempts.get(threading.get_ident())
        return found[-1] if found else None

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let this thread have the other function, in this block."""
        thread = threading.get_ident()
        with self._lock:
            if not self._attempts:
                self._place()
            self._attempts.setdefault(thread, []).append(next(_attempts))
        try:
            yield
        finally:
            with self._lock:
                self._attempts[thread].pop()
                if not self._attempts[thread]:
                    del self._attempts[thread]
                if not self._attempts:
                    self._take_away()


def general_lengths() -> Any:
    """Let ``len(x)`` of a tensor be ``x.shape[0]``, maybe the number of samples: Python makes one number of it.

    So is that of a list of the samples. A loop (``range(len(x))``) needs one number all the same.
    """
    return _lengths.here()


def hashed_sizes() -> Any:
    """Let a size of any number be a key in the user's code (``functools.lru_cache``), as export does not.

    What is kept under it belongs to one attempt to export: no other one finds it.
    """
    return _hashes.here()


def _length(value: Any, /) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:  # first of all, and briefly: export itself asks ten thousand times
        number = number_listed(value) if value and isinstance(value[0], (AllSamples, dict)) else None
        is_wanted = number is not None and _lengths.attempt is not None
        return number if is_wanted and not sys._getframe(1).f_code.co_filename.startswith(OWN) else _len(value)
    is_open = isinstance(value, Tensor) and kind.__len__ is Tensor.__len__ and _lengths.attempt is not None
    return value.shape[0] if is_open and value.dim() > 0 else _len(value)


def _hashed(size: torch.SymInt) -> int:
    attempt = _hashes.attempt
    is_torchs = attempt is None or sys._getframe(1).f_code.co_filename.startswith(TORCH)
    return _hash(size) if is_torchs else hash((attempt, str(size.node.expr)))


def _set_length(function: Any) -> None:
    builtins.len = function


def _set_hash(function: Any) -> None:
    torch.SymInt.__hash__ = function  # type: ignore[method-assign]


_lengths = _Shared(lambda: _set_length(_length), lambda: _set_length(_len))
_hashes = _Shared(lambda: _set_hash(_hashed), lambda: _set_hash(_hash))
