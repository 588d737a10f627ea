"""Keeps asking a provider for the requested size, on a thread of its own, since a cloud's API may be slow."""

import math
import threading
import time
from collections.abc import Callable

from varuna.core.errors import FleetError
from varuna.fleet.engines.growth import Growth, GrowthConfig
from varuna.fleet.engines.provider import CancelledThere, CapacityError, Provider

_LOOK_S = 0.5
_GIVE_BACK_TRIES = 4
_ALONE_S = 60.0
"""A run without a machine, whose provider gives none any more, ends after so long."""
_CANCELLED_S = 30.0
"""The same, of a run whose nodes were cancelled: their agents have left by then, or were killed."""


class Grower:
    """Asks until it is closed; ``want`` may be called by any thread.

    Args:
        provider: of nodes.
        config: bounds and patience.
        warn: gets a message when the cloud refuses, once until it grants again.
        end: ends the run, with a reason and an exit code: 0 is in order, after the current step.
        machines: how many the run has now.
        clock: seconds that only grow.
        pause_s: between tries to give back.
    """

    def __init__(
        self,
        provider: Provider,
        config: GrowthConfig,
        *,
        warn: Callable[[str], None],
        end: Callable[[str, int], None],
        machines: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = 5.0,
    ) -> None:
        self._provider, self._warn, self._end, self._machines, self._clock = provider, warn, end, machines, clock
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._growth = Growth(config=config)
        self._warned = self._refusal = ""
        self._patience_s, self._alone_since_s = _ALONE_S, math.inf
        self._changed, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="varuna-grower", daemon=True)

    @property
    def growth(self) -> Growth:
        """The newest request for nodes, and the time of the next one."""
        with self._lock:
            return self._growth

    def start(self) -> None:
        """Ask from now on."""
        self._thread.start()

    def request_nodes(self, nodes: int) -> None:
        """Ask for this many nodes from now on."""
        with self._lock:
            self._growth = self._growth.request_nodes(nodes, self._clock())
        self._changed.set()

    def close(self) -> None:
        """Ask no more, and let go of the group; bounded by the provider's own timeouts, and some tries.

        Raises:
            FleetError: not everything could be given back.
        """
        self._closed.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(30)
        for _ in range(_GIVE_BACK_TRIES - 1):  # a cloud that is busy at this moment would leave machines that cost
            try:
                return self._provider.close()
            except CapacityError:
                time.sleep(self._pause_s)
        return self._provider.close()

    def ask_if_due(self) -> None:
        """Ask once, if it is time; what was refused for good is not asked for again."""
        now_s, growth = self._clock(), self.growth
        if self._refusal:
            self._see_who_is_left(now_s)
            return
        if not growth.due(now_s) or (growth.wanted == 0 and growth.asked is None):
            return
        try:
            self._provider.resize(growth.wanted)
            size = self._provider.size()
        except CapacityError as error:
            self._settle(growth.refused(now_s), growth)
            self._say(f"requested {growth.wanted} nodes: {error}. Trying again.")
        except CancelledThere as error:
            # In order takes agents that are still there: some are killed before they can say goodbye.
            self._refusal, self._patience_s = str(error), _CANCELLED_S
            self._end(str(error), 0)
        except FleetError as error:
            self._refusal = str(error)
            self._say(f"no longer requesting nodes: {error}")
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave the run at its size
            self._settle(growth.refused(now_s), growth)
            self._say(f"requested {growth.wanted} nodes: internal error: {error!r} (please report it). Trying again.")
        else:
            self._settle(growth.granted(size, now_s), growth)
            self._warned = ""

    def _see_who_is_left(self, now_s: float) -> None:
        """End a run that has no machine, and gets none."""
        self._alone_since_s = math.inf if self._machines() else min(self._alone_since_s, now_s)
        if now_s >= self._alone_since_s + self._patience_s:
            self._closed.set()
            self._end(f"no machine is left, and no more can be requested: {self._refusal}", 1)

    def _settle(self, after: Growth, before: Growth) -> None:
        """Keep the outcome, unless the request has changed meanwhile."""
        with self._lock:
            if self._growth == before:
                self._growth = after

    def _say(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            self._warn(text)

    def _run(self) -> None:
        while not self._closed.is_set():
            self.ask_if_due()
            self._changed.wait(_LOOK_S)
            self._changed.clear()
