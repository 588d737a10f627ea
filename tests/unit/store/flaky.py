"""A store that fails as told, and time that passes only when somebody sleeps."""

from collections.abc import Callable
from typing import TypeVar

from varuna.core.errors import StoreUnavailable
from varuna.store.base import Chunks, Entry, Store

T = TypeVar("T")


class Time:
    """A clock, and a sleep that moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Killed(BaseException):
    """The process died here: nothing catches it."""


class Hooked:
    """Calls ``before(verb, name)`` and ``after(verb, name)`` around each operation; they may raise."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.before: Callable[[str, str], None] = lambda verb, name: None
        self.after: Callable[[str, str], None] = lambda verb, name: None

    @property
    def url(self) -> str:
        return self.inner.url

    def _around(self, verb: str, name: str, work: Callable[[], T]) -> T:
        self.before(verb, name)
        result = work()
        self.after(verb, name)
        return result

    def get(self, name: str) -> bytes:
        return self._around("get", name, lambda: self.inner.get(name))

    def put(self, name: str, data: bytes) -> None:
        self._around("put", name, lambda: self.inner.put(name, data))

    def create(self, name: str, data: bytes) -> None:
        self._around("create", name, lambda: self.inner.create(name, data))

    def write(self, name: str, chunks: Chunks) -> None:
        self._around("write", name, lambda: self.inner.write(name, chunks))

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        self._around("read_into", name, lambda: self.inner.read_into(name, start, view))

    def folders(self) -> list[str]:
        return self._around("folders", "", self.inner.folders)

    def entries(self, folder: str = "") -> list[Entry]:
        return self._around("entries", folder, lambda: self.inner.entries(folder))

    def remove(self, name: str) -> None:
        self._around("remove", name, lambda: self.inner.remove(name))

    def remove_folder(self, folder: str) -> None:
        for entry in self.inner.entries(folder):  # one by one, as an object store does
            self.remove(entry.name)
        self.inner.remove_folder(folder)

    def rename_folder(self, old: str, new: str) -> None:
        self._around("rename_folder", old, lambda: self.inner.rename_folder(old, new))


def down(verb: str, name: str) -> None:
    raise StoreUnavailable(f"cannot {verb} {name}: connection refused")
