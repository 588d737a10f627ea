"""A store that asks again: outages of minutes delay a checkpoint, they do not lose it."""

import random
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from varuna.core.errors import ObjectExists, ObjectMissing, StoreUnavailable
from varuna.process.bounded import Bounded
from varuna.process.console import warn
from varuna.store.base import Chunks, Entry, Store

T = TypeVar("T")

PATIENCE_S = 900.0
"""Seconds for which one operation is retried: longer than most outages, shorter than a night."""
SHOWN_S = 20.0
"""Seconds that a person waits for a listing, or for a manifest."""
_FIRST_S, _LONGEST_S = 0.5, 30.0
_TRIES_IN_SILENCE = 3


class RetryingStore:
    """Retries what ``StoreUnavailable`` ended, with growing pauses.

    Args:
        inner: the store.
        patience_s: how long one operation is retried.
        answer_s: how long one try is waited for, where a store that says nothing must hold no caller up. None: as long
            as the inner store lets it.
        clock: seconds.
        sleep: waits.
        say: hears that an operation is being retried.
    """

    def __init__(
        self,
        inner: Store,
        *,
        patience_s: float = PATIENCE_S,
        answer_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = warn,
    ) -> None:
        self.inner, self._patience_s, self._answer_s = inner, patience_s, answer_s
        self._clock, self._sleep, self._say = clock, sleep, say

    @property
    def url(self) -> str:
        """The URL of the inner store."""
        return self.inner.url

    def get(self, name: str) -> bytes:
        """Like ``get`` of the inner store, with retries."""
        return self._retried(lambda: self.inner.get(name))

    def put(self, name: str, data: bytes) -> None:
        """Like ``put`` of the inner store, with retries."""
        self._retried(lambda: self.inner.put(name, data))

    def create(self, name: str, data: bytes) -> None:
        """Like ``create`` of the inner store. A try that timed out may have succeeded, so the object is read back.

        Two writers must not give equal ``data``: each puts its own id into it.
        """
        in_doubt = False

        def attempt() -> None:
            nonlocal in_doubt
            try:
                self.inner.create(name, data)
            except StoreUnavailable:
                in_doubt = True
                raise
            except ObjectExists:
                if not in_doubt or self._found(name) != data:
                    raise

        self._retried(attempt)

    def write(self, name: str, chunks: Chunks) -> None:
        """Like ``write`` of the inner store; a retry starts from the first chunk again."""
        self._retried(lambda: self.inner.write(name, chunks))

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Like ``read_into`` of the inner store, with retries."""
        self._retried(lambda: self.inner.read_into(name, start, view))

    def size_bytes(self, name: str) -> int:
        """Like ``size_bytes`` of the inner store, with retries."""
        return self._retried(lambda: self.inner.size_bytes(name))

    def folders(self) -> list[str]:
        """Like ``folders`` of the inner store, with retries."""
        return self._retried(self.inner.folders)

    def entries(self, folder: str = "") -> list[Entry]:
        """Like ``entries`` of the inner store, with retries."""
        return self._retried(lambda: self.inner.entries(folder))

    def remove(self, name: str) -> None:
        """Like ``remove`` of the inner store, with retries."""
        self._retried(lambda: self.inner.remove(name))

    def remove_folder(self, folder: str) -> None:
        """Like ``remove_folder`` of the inner store, with retries."""
        self._retried(lambda: self.inner.remove_folder(folder))

    def rename_folder(self, old: str, new: str) -> None:
        """Like ``rename_folder`` of the inner store, with retries."""
        self._retried(lambda: self.inner.rename_folder(old, new))

    def _found(self, name: str) -> bytes | None:
        try:
            return self.inner.get(name)
        except ObjectMissing:
            return None

    def _retried(self, attempt: Callable[[], T]) -> T:
        begin_s, tries, pause_s = self._clock(), 0, _FIRST_S
        while True:
            tries += 1
            try:
                return self._answered(attempt)
            except StoreUnavailable as error:
                waited_s = self._clock() - begin_s
                if waited_s + pause_s > self._patience_s:
                    raise StoreUnavailable(f"{error} (tried {tries} times in {waited_s:.0f} s)") from error
                if tries == _TRIES_IN_SILENCE:
                    self._say(f"{error}; trying for up to {self._patience_s:.0f} s")
            self._sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _answered(self, attempt: Callable[[], T]) -> T:
        if self._answer_s is None:
            return attempt()
        try:
            return Bounded(attempt).result(self._answer_s)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self.url} has not answered for {self._answer_s:.0f} s") from error


def impatient(store: Store, patience_s: float, answer_s: float | None = None) -> Store:
    """Return the same store, retried for no longer than this, and in silence: for what can be left undone.

    Args:
        store: a folder or a bucket.
        patience_s: how long one operation is retried.
        answer_s: how long one try may take; None: as long as it takes.
    """
    if isinstance(store, RetryingStore):
        store = store.inner
    elif answer_s is None:
        return store
    return RetryingStore(store, patience_s=patience_s, answer_s=answer_s, say=lambda text: None)


def writer_id() -> str:
    """Make a name for this writer that no other has."""
    return secrets.token_hex(8)
