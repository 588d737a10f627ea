"""A worker's charts: committed steps go to the services by a thread of their own, while this worker is the main one."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from varuna.extras.trackers.services import services_of
from varuna.extras.trackers.tracker import Service
from varuna.job.charts import Tracker
from varuna.process.console import warn
from varuna.process.threads import start

WAITING = 10_000
"""Most steps that wait for a slow service; steps beyond them are left out."""
CLOSE_S = 30.0

_Work = Callable[[], None]


class Trackers:
    """Tells services of steps; methods return at once, but for ``close``, and no failure of a service gets out.

    Args:
        loggers: as the user gives them.
        config: numbers and texts of the job, which a new chart shows.
        chart: finds the chart's name; gets whether the next step is step 0. Called by the thread, since it may wait.
        close_s: bound on ``close``.

    Raises:
        UsageError: the loggers are no list, or one of them is not known, not installed, or no tracker.
    """

    def __init__(
        self,
        loggers: Sequence[str | Tracker],
        *,
        config: Mapping[str, object],
        chart: Callable[[bool], str],
        close_s: float = CLOSE_S,
    ) -> None:
        self._services = services_of(loggers)
        self._config, self._chart, self._close_s = config, chart, close_s
        self._next: int | None = None  # while this worker is the main one
        self._left_out = 0
        self._work: queue.Queue[_Work | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None

    def add_step(self, step: int, values: Mapping[str, float], *, is_main: bool) -> None:
        """Chart a committed step; a worker that is not the main one leaves its charts to the one that is."""
        if not self._services:
            return
        if not is_main:
            if self._next is not None:
                self._next = None
                self._do(self._rest)
            return
        if self._next is None or step < self._next:
            self._do(lambda: self._begin(step))
        self._next = step + 1
        found = dict(values)
        self._do(lambda: self._each(lambda service: service.log(step, found)))

    def more(self, values: Mapping[str, float]) -> None:
        """Chart more values of the newest step."""
        if self._next is None:
            return
        step, found = self._next - 1, dict(values)
        self._do(lambda: self._each(lambda service: service.log(step, found, more=True)))

    def close(self) -> None:
        """Write what is left, for ``close_s`` at most."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is None:
            return
        deadline_s = time.monotonic() + self._close_s
        for work in (self._rest, None):
            try:
                self._work.put(work, timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Full:
                break
        thread.join(max(0.0, deadline_s - time.monotonic()))
        if thread.is_alive():
            services = ", ".join(self._services)
            warn(f"not all steps have reached {services}: there was no answer for {self._close_s:g} s")

    # -- on the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave charts without an end
                self._services.clear()
                warn(f"nothing is charted any more, and training goes on: {type(error).__name__}: {error}")

    def _begin(self, step: int) -> None:
        chart = self._chart(step == 0)
        self._each(lambda service: service.begin(chart, step, self._config))

    def _rest(self) -> None:
        self._each(lambda service: service.close())

    def _each(self, work: Callable[[Service], None]) -> None:
        """Work with each service; one that fails is not used any more."""
        for name, service in list(self._services.items()):
            try:
                work(service)
            except Exception as error:  # noqa: BLE001 - libraries of others, and networks
                del self._services[name]
                warn(f"no more steps go to {name}, and training goes on: {type(error).__name__}: {error}")

    # -- on the caller's thread ------------------------------------------------------------------------------

    def _do(self, work: _Work) -> None:
        if self._thread is None:
            self._thread = start("trackers", self._run)
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._left_out += 1
            if self._left_out == 1:
                services = ", ".join(self._services)
                warn(f"{services}: too slow for the run, so steps are left out of the charts")
