"""The store of checkpoints, tried with the credentials that are found here: every operation that checkpoints need."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from varuna.core.errors import ObjectExists, ObjectMissing, StoreError, VarunaError
from varuna.extras.doctor.judging.facts import StoreFacts, StoreStep
from varuna.process.bounded import Bounded
from varuna.store.base import Store
from varuna.store.opening import open_store
from varuna.store.retry import RetryingStore

BOUND_S = 10.0
_FOLDER = "varuna-doctor"


def open_once(place: str) -> Store:
    """The store, without the patience of a run.

    Raises:
        VarunaError: it cannot be opened.
    """
    store = open_store(place)
    return store.inner if isinstance(store, RetryingStore) else store


def try_store(place: str, *, mark: str, owner: str, seeks_mark: bool) -> StoreFacts:
    """Write, read, list, create and delete below a folder of its own; within some seconds.

    Args:
        place: a folder or a URL.
        mark: names this check's folder in the store; the same on all machines that have met.
        owner: names this machine, in letters and digits.
        seeks_mark: also look for what the first machine has written (``put_mark``).
    """
    steps: list[StoreStep] = []
    work = Bounded(lambda: _try(place, f"{_FOLDER}-{mark}", owner, steps, seeks_mark))
    try:
        shared = work.result(BOUND_S)
    except TimeoutError:
        problem = f"no answer within {BOUND_S:.0f} s"
        return StoreFacts(url=place, steps=(*steps, StoreStep(name=_next(steps), took_s=BOUND_S, problem=problem)))
    except (VarunaError, OSError) as error:
        return StoreFacts(url=place, steps=(*steps, StoreStep(name="open", took_s=0.0, problem=str(error))))
    return StoreFacts(url=place, steps=tuple(steps), shared=shared)


def put_mark(place: str, mark: str) -> None:
    """Write what the other machines look for.

    Raises:
        VarunaError: it cannot be written; trying the store says why.
    """
    open_once(place).put(f"{_FOLDER}-{mark}/shared", mark.encode())


def remove_mark(place: str, mark: str) -> None:
    """Remove all that this check has written, if that is possible."""
    try:
        Bounded(lambda: open_once(place).remove_folder(f"{_FOLDER}-{mark}")).result(BOUND_S)
    except (VarunaError, OSError, TimeoutError):
        return  # trying the store has said so


_ORDER = ("write", "read", "list", "conditional write", "delete")


def _next(steps: list[StoreStep]) -> str:
    return _ORDER[min(len(steps), len(_ORDER) - 1)]


def _try(place: str, folder: str, owner: str, steps: list[StoreStep], seeks_mark: bool) -> bool | None:
    store = open_once(place)
    own = _OwnObjects(store, f"{folder}/{owner}", folder, owner.encode())
    for step, work in zip(_ORDER, (own.write, own.read, own.find, own.create, own.remove), strict=True):
        steps.append(_timed(step, work))
        if steps[-1].problem:
            if step != "delete":
                _timed("delete", own.remove)
            return None
    if not seeks_mark:
        return None
    try:
        return bool(store.get(f"{folder}/shared"))
    except ObjectMissing:
        return False


@dataclass(frozen=True)
class _OwnObjects:
    """The objects that one machine writes to try a store."""

    store: Store
    name: str
    folder: str
    content: bytes

    def write(self) -> None:
        self.store.put(self.name, self.content)

    def read(self) -> None:
        if self.store.get(self.name) != self.content:
            raise StoreError(f"what was read of {self.store.url}/{self.name} is not what was written")

    def find(self) -> None:
        if self.name not in [entry.name for entry in self.store.entries(self.folder)]:
            raise StoreError(f"{self.store.url}/{self.name} was written, but is not listed: its listings lag behind")

    def create(self) -> None:
        name = f"{self.name}-new"
        self.store.create(name, self.content)
        try:
            self.store.create(name, b"another")
        except ObjectExists:
            return
        raise StoreError(f"{self.store.url}/{name} could be written twice: leases of checkpoints need it refused")

    def remove(self) -> None:
        self.store.remove(f"{self.name}-new")
        self.store.remove(self.name)


def _timed(name: str, work: Callable[[], None]) -> StoreStep:
    begin_s = time.monotonic()
    try:
        work()
    except (VarunaError, OSError) as error:
        return StoreStep(name=name, took_s=time.monotonic() - begin_s, problem=str(error))
    return StoreStep(name=name, took_s=time.monotonic() - begin_s)
