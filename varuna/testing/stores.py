"""A store of checkpoints in memory that fails as told."""

import itertools
from collections.abc import Callable
from typing import TypeVar

from varuna.core.errors import StoreUnavailable
from varuna.store.base import Chunks, Entry, Store
from varuna.store.opening import keep_in_memory, open_store

T = TypeVar("T")
Hook = Callable[[str, str], None]
_numbers = itertools.count()


class HookedStore:
    """Calls ``before(verb, name)`` and ``after(verb, name)`` around each operation of another store; they may raise."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.before: Hook = lambda verb, name: None
        self.after: Hook = lambda verb, name: None

    @property
    def url(self) -> str:
        """The other store's place."""
        return self.inner.url

    def _around(self, verb: str, name: str, work: Callable[[], T]) -> T:
        self.before(verb, name)
        result = work()
        self.after(verb, name)
        return result

    def get(self, name: str) -> bytes:
        """See ``Store``, as for the methods below."""
        return self._around("get", name, lambda: self.inner.get(name))

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a small object."""
        self._around("put", name, lambda: self.inner.put(name, data))

    def create(self, name: str, data: bytes) -> None:
        """Write a small object, unless it exists."""
        self._around("create", name, lambda: self.inner.create(name, data))

    def write(self, name: str, chunks: Chunks) -> None:
        """Write or replace an object of any size."""
        self._around("write", name, lambda: self.inner.write(name, chunks))

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the object's bytes from ``start`` on."""
        self._around("read_into", name, lambda: self.inner.read_into(name, start, view))

    def size_bytes(self, name: str) -> int:
        """Return the size of an object."""
        return self._around("size_bytes", name, lambda: self.inner.size_bytes(name))

    def folders(self) -> list[str]:
        """Return names of the folders at the top."""
        return self._around("folders", "", self.inner.folders)

    def entries(self, folder: str = "") -> list[Entry]:
        """List all objects below a folder."""
        return self._around("entries", folder, lambda: self.inner.entries(folder))

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._around("remove", name, lambda: self.inner.remove(name))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder's objects one by one, as an object store does."""
        for entry in self.inner.entries(folder):
            self.remove(entry.name)
        self.inner.remove_folder(folder)

    def rename_folder(self, old: str, new: str) -> None:
        """Move a folder's objects."""
        self._around("rename_folder", old, lambda: self.inner.rename_folder(old, new))


class FailingStore(HookedStore):
    """An empty store in this process's memory; pass its ``url`` as ``checkpoints``.

    ``verb`` is the name of a method of ``varuna.store.base.Store``: checkpoints are written with ``write`` (the state
    of sections) and ``put`` and ``create`` (manifests and the lease), and read with ``get`` and ``read_into``.
    """

    def __init__(self) -> None:
        super().__init__(open_store(f"memory://varuna-testing-{next(_numbers)}"))
        keep_in_memory(self)
        self.before = self._maybe_fail
        self.seen: list[tuple[str, str]] = []
        """(verb, name) of each operation so far"""
        self._reasons: dict[str, str] = {}

    def fail(self, *verbs: str, reason: str = "503 service unavailable") -> None:
        """Let these operations fail from now on; with no verb, none does."""
        self._reasons = dict.fromkeys(verbs, reason)

    def _maybe_fail(self, verb: str, name: str) -> None:
        self.seen.append((verb, name))
        if verb in self._reasons:
            raise StoreUnavailable(f"cannot {verb} {name or 'the store'} in {self.url}: {self._reasons[verb]}")
