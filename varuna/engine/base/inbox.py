"""The one place where a training thread waits.

Everything that arrives from other threads (activations, gradients, batches, reduced sections, the vote) is
put here; the thread that ends the generation aborts it. So every wait has a bound, an owner and a name.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from varuna.core.errors import DeviceError, LinkError
from varuna.engine.base.wait_bounds import Awaited, Heard, Patience, Scene, Waiting
from varuna.process.console import say


class GenerationEnded(Exception):
    """Signal that the manager has ended this generation: abandon it and report what is held."""


class Inbox:
    """Arrivals of one generation, by key; thread-safe. One thread waits: see ``pause`` for the others."""

    def __init__(
        self,
        patience: Patience | None = None,
        *,
        who: str = "this rank",
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        tell: Callable[[str], None] = say,
    ) -> None:
        """Begin empty, for a generation that forms.

        Args:
            patience: bounds of waits.
            who: name of the waiting rank in errors, which another rank may log.
            rank: the same as a number.
            ranks: all that run a stage of the generation.
            tell: is given what people should hear of a wait that lasts.
        """
        self.who = who
        self._rank, self._ranks, self._tell = rank, ranks, tell
        self.patience = patience or Patience()
        self._changed = threading.Condition()
        self._arrived: dict[Hashable, Any] = {}
        self._failure: BaseException | None = None
        self._stalled_s, self._step_s = self.patience.forming_s, 0.0
        self._waits = 0
        self.waiting: Waiting | None = None
        """the wait that the training thread is in just now"""
        self.heard: Mapping[int, Heard] = {}
        """doings of other ranks, as last heard"""
        self.over = threading.Event()
        """the generation was aborted"""

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
        if isinstance(failure, GenerationEnded):  # with the frames that it came through, which hold the generation
            failure = failure.with_traceback(None)
        with self._changed:
            # A link that breaks is often the echo of a generation that ends elsewhere: its end must win.
            if self._failure is None or isinstance(failure, GenerationEnded):
                self._failure = failure
                # What has arrived holds memory, and no wait will take it any more.
                self._arrived.clear()
                self._changed.notify_all()
        self.over.set()

    def stir(self) -> None:
        """Let the waiting thread look again, after a change that is not an arrival."""
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the generation, if anything did: its end as an error of its own for each thread."""
        if isinstance(self._failure, GenerationEnded):
            raise GenerationEnded(*self._failure.args)
        if self._failure is not None:
            raise self._failure

    @property
    def ended(self) -> bool:
        """Whether the generation was aborted."""
        return self._failure is not None

    def has(self, key: Hashable) -> bool:
        """Return whether ``key`` has arrived."""
        return key in self._arrived

    def failed(self, key: Hashable) -> bool:
        """Return whether an exception has arrived in place of ``key``."""
        return isinstance(self._arrived.get(key), BaseException)

    def expect_step(self, *step_s: float) -> None:
        """Set how long a step takes, predicted or measured; bounds of waits for other ranks follow from it."""
        self._stalled_s, self._step_s = self.patience.stalled_after_s(*step_s), max(step_s, default=0.0)

    @property
    def stalled_s(self) -> float:
        """Seconds that all ranks may wait for one another, or one for its device."""
        return self._stalled_s

    def busy_after_s(self, longest_s: float) -> float:
        """Return the seconds that this rank's own work may take that others wait for; the longest so far is known."""
        return self.patience.busy_after_s(longest_s, self._step_s)

    def take(self, key: Hashable, awaited: Callable[[], Awaited]) -> Any:
        """Wait for ``key`` and remove it; an exception in its place is raised.

        Raises:
            LinkError: as ``wait``.
        """
        if key not in self._arrived:
            self.wait(lambda: key in self._arrived, awaited)
        with self._changed:
            self.check()
            value = self._arrived.pop(key)
            self._changed.notify_all()  # a receiver may wait for the place
        if isinstance(value, BaseException):
            raise value
        return value

    def wait(self, ready: Callable[[], bool], awaited: Callable[[], Awaited]) -> None:
        """Wait until ``ready``, which looks at arrivals, and at what ``stir`` is called for; say so if that lasts.

        Raises:
            LinkError: the wait cannot be right any more (``engine.base.wait_bounds``); names what is ``awaited``, and
                from whom.
            DeviceError: likewise, and this rank's device is waited for.
        """
        with self._changed:
            self.check()
            if ready():
                return
            self._waits += 1
            waiting = self.waiting = Waiting(self._waits, time.monotonic(), awaited)
        told = False
        try:
            while not self._came(waiting, ready, told=told):
                now_s, scene = time.monotonic(), self._scene()
                if fault := scene.fault(waiting, now_s, self.patience):
                    raise DeviceError(fault) if awaited().by_device else LinkError(fault)
                if not told:
                    self._tell(scene.describe_wait(awaited(), now_s - waiting.since_s))
                    told = True
        finally:
            self.waiting = None

    def pause(self, ready: Callable[[], bool]) -> None:
        """Wait for the training thread of this rank, on another one: no longer than the generation lasts."""
        self._comes(ready, None)

    def _came(self, waiting: Waiting, ready: Callable[[], bool], *, told: bool) -> bool:
        """Wait until it is time to look at the wait; the first rank to give up a deadlock breaks the others' links."""
        try:
            return self._comes(ready, self.patience.look_s if told else min(self.patience.told_s, self.patience.last_s))
        except LinkError as error:
            if told and (circle := self._scene().circle(waiting, self.patience, self._stalled_s / 2)):
                raise LinkError(f"{error}. {circle}") from error
            raise

    def _comes(self, ready: Callable[[], bool], bound_s: float | None) -> bool:
        deadline_s = None if bound_s is None else time.monotonic() + bound_s
        with self._changed:
            while True:
                self.check()
                if ready():
                    return True
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._changed.wait(left_s)

    def _scene(self) -> Scene:
        return Scene(self.who, self._rank, self._ranks, self.heard, self._stalled_s)
