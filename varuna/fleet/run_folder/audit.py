"""The audit of who tried to do what: one line each in the journal, and few lines even for a flood."""

import time
from collections.abc import Callable

from varuna.fleet.state.run_events import Audited

_EVERY_S = 10.0
_SOURCES = 1024
_REASONS = 16


class Audit:
    """Passes on what was done, and refusals at most once in 10 s for each kind and address; for one thread.

    A machine of the run's own that is refused is something that its user can mend: that is said, once for each reason.

    Args:
        publish: gets what is worth a line.
        clock: seconds.
        warn: shows the run's user a sentence.
    """

    def __init__(
        self,
        publish: Callable[[Audited], None],
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._publish, self._clock, self._warn = publish, clock, warn
        self._silent: dict[tuple[str, str], tuple[float, int]] = {}  # until when, and how many were kept back
        self._said: set[str] = set()

    def did(self, action: str, address: str) -> None:
        """Note a change by a person who had the right."""
        self._publish(Audited(action=action, address=address, allowed=True))

    def refused(self, action: str, address: str, why: str) -> None:
        """Note a request that was refused."""
        key, now_s = (action, address), self._clock()
        until_s, kept_back = self._silent.get(key, (0.0, 0))
        if now_s < until_s:
            self._silent[key] = (until_s, kept_back + 1)
            return
        if len(self._silent) >= _SOURCES:  # somebody has many addresses: what we remember of them stays bounded
            self._silent.clear()
        self._silent[key] = (now_s + _EVERY_S, 0)
        more = f" ({kept_back} more times in the last {_EVERY_S:.0f} s)" if kept_back else ""
        self._publish(Audited(action=action, address=address, allowed=False, why=why + more))

    def turned_away(self, action: str, address: str, why: str) -> None:
        """Note that a machine with this run's JOIN string, or a name in it, was not let in."""
        self.refused(action, address, why)
        if why not in self._said and len(self._said) < _REASONS:
            self._said.add(why)
            self._warn(f"a machine at {address} was not let in: {why}")
