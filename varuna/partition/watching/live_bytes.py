"""Exact bytes of the tensors that are alive: each storage counts from the op that made it until it is freed.

Real and fake tensors are counted. What a kernel allocates for itself and frees before it returns is not seen.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated:
    """A count that ``watch`` adds to, from any number of threads."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        """since the last ``restart``"""
        self._lock = threading.RLock()  # a storage may die while another is counted
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def watch(self) -> AbstractContextManager[object]:
        """Count the storages that this thread's ops make in a block; each thread enters one of its own."""
        return _Watch(self.add)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage in self._known:
                return
            size_bytes = storage.nbytes()
            self._known[storage] = size_bytes
            self.now_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            weakref.finalize(storage, self._freed, size_bytes).atexit = False

    def restart(self) -> None:
        """Forget the peak so far."""
        with self._lock:
            self.peak_bytes = self.now_bytes

    def _freed(self, size_bytes: int) -> None:
        with self._lock:
            self.now_bytes -= size_bytes


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, add: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result
