"""Logins of browsers that read a run: a link that works once and soon opens a session that is a tab's own.

The link's code follows a ``#``, so it is in no request's address and in no log of one; the page trades it for a
session, and shows that in a header. There is no cookie: browsers send those to all ports of a host, whoever listens.
"""

import secrets
import threading
import time
from collections.abc import Callable

LINK_LIFE_S = 600.0
_SESSION_LIFE_S = 12 * 3600.0
_MOST_LINKS, _MOST_SESSIONS = 64, 256


class Logins:
    """All methods may be called by any thread.

    Args:
        clock: in seconds, and never set back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._links: dict[str, float] = {}  # until when; the first came first
        self._sessions: dict[str, float] = {}

    def invite(self) -> str:
        """The code of a new link."""
        return self._add(self._links, LINK_LIFE_S, _MOST_LINKS)

    def redeem(self, code: str) -> str | None:
        """A session for a code that was not used and is not too old."""
        with self._lock:
            until_s = self._links.pop(code, None)
        if until_s is None or self._clock() >= until_s:
            return None
        return self._add(self._sessions, _SESSION_LIFE_S, _MOST_SESSIONS)

    def admits(self, session: str) -> bool:
        """Return whether it may still read."""
        with self._lock:
            return self._clock() < self._sessions.get(session, float("-inf"))

    def void(self) -> int:
        """None of them opens anything any more; returns how many did."""
        with self._lock:
            now_s = self._clock()
            count = sum(now_s < until_s for until_s in (*self._links.values(), *self._sessions.values()))
            self._links.clear()
            self._sessions.clear()
        return count

    def _add(self, kept: dict[str, float], life_s: float, most: int) -> str:
        made = secrets.token_urlsafe(24)
        with self._lock:
            while len(kept) >= most:
                del kept[next(iter(kept))]
            kept[made] = self._clock() + life_s
        return made
