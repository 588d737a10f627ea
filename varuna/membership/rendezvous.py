"""A worker's side of the rendezvous: a store of keys whose values come over its connection to the manager."""

import threading
import time
from collections.abc import Callable, Sequence

from varuna.core.messages import MAX_KEYS, Found, FromWorker, Offered, Sought

_AGAIN_S = 3.0
"""Interval at which offers and questions are repeated: a restarted manager knows none of them."""
_FRESH_S = 5.0
"""Age after which a value is asked for again: some values change, such as what a member is doing."""
_AWAY_S = 20.0
"""Time without any answer after which known values are not trusted any more."""


class Rendezvous:
    """The store of one generation. ``take`` runs on the connection's thread, the rest on any.

    Args:
        generation: its number.
        post: sends to the manager.
        clock: seconds.
    """

    def __init__(
        self, generation: int, post: Callable[[FromWorker], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.generation = generation
        self._post, self._clock = post, clock
        self._lock = threading.Lock()
        self._own: dict[str, bytes] = {}
        self._values: dict[str, tuple[bytes, float]] = {}  # of others, and when they came
        self._sought_s: dict[str, float] = {}  # when a key that was not answered was sought first, and last
        self._asked_s: dict[str, float] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Offer a value to all members, the first one or a newer one."""
        with self._lock:
            self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._offer([key])

    def get(self, key: str) -> bytes:
        """A value that ``check`` has found, a few seconds old at most while members call ``check``.

        Raises:
            KeyError: it has not come.
        """
        with self._lock:
            return self._own[key] if key in self._own else self._values[key][0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all values are here; what is missing, or old, is sought.

        Raises:
            RuntimeError: the manager has not answered for long about a value that was here.
        """
        now_s = self._clock()
        with self._lock:
            missing = [key for key in keys if key not in self._own and key not in self._values]
            old = [key for key in keys if key in self._values and now_s - self._values[key][1] > _FRESH_S]
            if old:  # one question for all old values: a caller that reads one reads the others
                old = [key for key, (_, came_s) in self._values.items() if now_s - came_s > _FRESH_S]
            wanted = [key for key in (*missing, *old) if now_s - self._asked_s.get(key, -_AGAIN_S) >= _AGAIN_S]
            again = [key for key in wanted if key in self._sought_s]
            for key in wanted:
                self._asked_s[key] = now_s
                self._sought_s.setdefault(key, now_s)
            away = [key for key in old if now_s - self._sought_s.get(key, now_s) > _AWAY_S]
        if again:
            self._offer(list(self._own))
        for start in range(0, len(wanted), MAX_KEYS):
            self._post(Sought(generation=self.generation, keys=tuple(wanted[start : start + MAX_KEYS])))
        if away:
            raise RuntimeError(f"the manager has not answered for {_AWAY_S:.0f} s")
        return not missing

    def take(self, found: Found) -> None:
        """Take values that have arrived."""
        if found.generation != self.generation:
            return
        now_s = self._clock()
        with self._lock:
            for key, value in found.values.items():
                self._values[key] = value, now_s
                self._sought_s.pop(key, None)
                self._asked_s.pop(key, None)

    def _offer(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._post(Offered(generation=self.generation, key=key, value=self._own[key]))
