"""Work that may hang, such as a look at a disk that is gone, on threads that are waited for no longer than a bound."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Bounded(Generic[T]):
    """Starts ``work`` on a thread at once; for one caller."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._found, self._error = work, None, None  # type: tuple[Callable[[], T], T | None, Exception | None]
        self._thread = threading.Thread(target=self._run, name="varuna-bounded", daemon=True)
        self._thread.start()

    def result(self, bound_s: float) -> T:
        """Return the result of the work.

        Raises:
            TimeoutError: nothing yet after ``bound_s``.
            Exception: the work raised it.
        """
        self._thread.join(bound_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError
        return self._found  # type: ignore[return-value]  # it has returned

    def _run(self) -> None:
        try:
            self._found = self._work()
        except Exception as error:  # noqa: BLE001 - handed to the caller
            self._error = error
