"""A bound on bandwidth, so that uploads do not starve training."""

import threading
import time
from collections.abc import Callable


class Throttle:
    """Lets bytes through at a rate; one for all uploads of a process."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_s = clock()  # when everything let through so far has passed

    def wait(self, size_bytes: int) -> None:
        """Return when ``size_bytes`` more may pass; what was not used before is lost, so there are no bursts."""
        with self._lock:
            begin_s = max(self._free_s, self._clock())
            self._free_s = begin_s + size_bytes / self._bytes_per_s
            wait_s = begin_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
