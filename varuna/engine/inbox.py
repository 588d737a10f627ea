"""The one place where a training thread waits.

Everything that arrives from other threads (activations, gradients, batches, reduced sections, the vote) is
put here; whoever ends the generation aborts it. So every wait has a bound, an owner and a name.
"""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from varuna.core.errors import LinkError

WAIT_BOUND_S = 1800.0
"""Last resort: longer than any legal wait (a peer's evaluation between two steps), but never for ever."""


class GenerationEnded(Exception):
    """The manager has ended this generation; abandon it and report what is held."""


class Inbox:
    """Arrivals of one generation, by key; thread-safe."""

    def __init__(self, bound_s: float = WAIT_BOUND_S, *, who: str = "this rank") -> None:
        self.who = who
        """waits here, for errors: the log that has them may be another rank's"""
        self._changed = threading.Condition()
        self._arrived: dict[Hashable, Any] = {}
        self._failure: BaseException | None = None
        self._bound_s = bound_s

    def put(self, key: Hashable, value: Any) -> None:
        """Deliver; dropped if the generation is over."""
        with self._changed:
            if self._failure is None:
                self._arrived[key] = value
                self._changed.notify_all()

    def abort(self, failure: BaseException) -> None:
        """End every wait, present and future, with ``failure``; the first one stands.

        The end of a generation replaces a link's error: the manager's word counts more.
        """
        with self._changed:
            if self._failure is None or isinstance(failure, GenerationEnded):
                self._failure = failure
                self._arrived.clear()
                self._changed.notify_all()

    def stir(self) -> None:
        """Whoever waits looks again: something else has changed than what is here."""
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the generation, if anything did."""
        if self._failure is not None:
            raise self._failure

    @property
    def ended(self) -> bool:
        """The generation was aborted."""
        return self._failure is not None

    def has(self, key: Hashable) -> bool:
        """Whether ``key`` has arrived."""
        return key in self._arrived

    def failed(self, key: Hashable) -> bool:
        """Whether an exception has arrived in place of ``key``."""
        return isinstance(self._arrived.get(key), BaseException)

    def take(self, key: Hashable, waiting_for: Callable[[], str]) -> Any:
        """Wait for ``key`` and remove it; an exception in its place is raised.

        Raises:
            LinkError: the bound has passed; names what ``waiting_for`` says.
        """
        self.wait(lambda: key in self._arrived, waiting_for)
        with self._changed:
            self.check()
            value = self._arrived.pop(key)
            self._changed.notify_all()  # a receiver may wait for the place
        if isinstance(value, BaseException):
            raise value
        return value

    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str]) -> None:
        """Wait until ``ready``, which looks at arrivals, and at what somebody stirs for.

        Raises:
            LinkError: the bound has passed.
        """
        deadline_s = time.monotonic() + self._bound_s
        with self._changed:
            while True:
                self.check()
                if ready():
                    return
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LinkError(
                        f"{self.who} waited {self._bound_s:.0f} s for {waiting_for()}, and nothing came. The peer may "
                        "be frozen or cut off; look at its log, then start the same command again to resume."
                    )
                self._changed.wait(left_s)
