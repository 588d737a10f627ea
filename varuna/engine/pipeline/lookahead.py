"""The lead of the training thread over its device, and the times of actions there.

A call to a GPU returns before its work is done. Were actions chosen as fast as they can be launched, the policy would
decide long before it must, on arrivals of long ago, and every action would seem to take a moment. So the training
thread is one action ahead: the device always has the next one, and the choice after it is made with fresh facts.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from varuna.core.times import Interval
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.device.pulse import title
from varuna.engine.device.streams import Event, Streams
from varuna.engine.links.links import Courier
from varuna.engine.pipeline.timeline import StepTimes, interval_of
from varuna.schedule.actions import Action


class Lookahead(Protocol):
    """Record of the actions and waits of a step, which is told of each, in order."""

    times_sections: bool
    """whether the seconds of each action within the stage's sections are known even if that costs something"""

    def begin(self, step: int, begin_s: float) -> None:
        """Note that the actions of a step begin, which itself began at ``begin_s``."""

    def waited(self, awaited: Action) -> None:
        """Note that the training thread had nothing to do until something for ``awaited`` came."""

    def begin_action(self) -> None:
        """Note that an action begins."""

    def computing(self) -> None:
        """Note that its sections begin."""

    def computed(self) -> None:
        """Note that the last operation of its sections is launched."""

    def end_action(self, action: Action) -> None:
        """Note that its last operation is launched; return once the device is through with the action before."""

    def finish(self) -> StepTimes:
        """Wait until the device is through with the last action; return the step's times by ``time.monotonic``."""

    def close(self) -> None:
        """Let its thread end, if it has one."""


class HostLookahead:
    """The training thread computes, so it is never ahead."""

    times_sections = True

    def begin(self, step: int, begin_s: float) -> None:
        """Note that the actions begin now."""
        self._step, self._begin_s, self._now_s = step, begin_s, time.monotonic()
        self._actions: list[Interval] = []
        self._waits: list[Interval] = []

    def waited(self, awaited: Action) -> None:
        """Note that the wait ends now."""
        since_s, self._now_s = self._now_s, time.monotonic()
        self._waits.append(interval_of(awaited, since_s, self._now_s))

    def begin_action(self) -> None:
        """Do nothing: the time of choosing an action counts with it."""

    def computing(self) -> None:
        """Note that the sections begin now."""
        self._computing_s = time.monotonic()

    def computed(self) -> None:
        """Note that the sections end now."""
        self._inside_s = time.monotonic() - self._computing_s

    def end_action(self, action: Action) -> None:
        """Note that the action ends now."""
        since_s, self._now_s = self._now_s, time.monotonic()
        self._actions.append(interval_of(action, since_s, self._now_s, self._inside_s))

    def finish(self) -> StepTimes:
        """Return the times of the step."""
        return StepTimes(self._step, self._begin_s, self._now_s, tuple(self._actions), tuple(self._waits))

    def close(self) -> None:
        """Do nothing: there is no thread."""


class Noted(NamedTuple):
    """One action on the device."""

    action: Action
    began: Event
    ended: Event
    waited: bool
    """the training thread had to wait for what the action needs"""
    sections: tuple[Event, Event] | None = None
    """begin and end of what the stage's sections compute"""


class DeviceLookahead:
    """The lookahead of a GPU: times come from its events, and one action may be queued after the running one."""

    def __init__(self, streams: Streams, inbox: Inbox) -> None:
        self._streams, self._inbox, self.times_sections = streams, inbox, False
        self._watch = Courier(inbox, "the device")
        self._name = title(streams)
        self._origin: tuple[Event, float] | None = None  # a passed event, and when it was passed

    def begin(self, step: int, begin_s: float) -> None:
        """Mark the begin of the step on the device: once that is through with the update of the one before."""
        self._step, self._waits, self._sections = step, False, list[Event]()
        self._noted: list[Noted] = []
        self._started = self._mark()
        if self._origin is None:
            # Events know only distances: one moment of the host's clock, taken when one has passed, places all others.
            self._watch.submit(("started", step), self._started.wait)
            self._inbox.take(
                ("started", step),
                lambda: Awaited(f"{self._name} to finish what came before the first step", by_device=True),
            )
            self._origin = self._started, time.monotonic()

    def waited(self, awaited: Action) -> None:
        """Note that the device was idle; for how long is known after the next action."""
        self._waits = True

    def begin_action(self) -> None:
        """Mark the begin of an action: once the device is through with what is queued."""
        self._began = self._mark()

    def computing(self) -> None:
        """Mark the begin of the sections, if sections are timed."""
        self._sections = [self._mark()] if self.times_sections else []

    def computed(self) -> None:
        """Mark their end."""
        if self._sections:
            self._sections.append(self._mark())

    def end_action(self, action: Action) -> None:
        """Wait until the action before is done, in the inbox, so that the end of a generation ends it."""
        sections = (self._sections[0], self._sections[1]) if self._sections else None
        noted = Noted(action, self._began, self._mark(), self._waits, sections)
        self._watch.submit(("passed", self._step, len(self._noted)), noted.ended.wait)
        # The action before this one, not this one: so the device always has the next one queued.
        if self._noted:
            self._pass(len(self._noted) - 1)
        self._noted.append(noted)
        self._waits = False

    def finish(self) -> StepTimes:
        """Wait for the last action."""
        self._pass(len(self._noted) - 1)
        assert self._origin is not None
        origin, origin_s = self._origin
        start_s = origin_s + (self._started.seconds_since(origin) if origin is not self._started else 0.0)
        self._origin = self._started, start_s  # a new one every step: seconds are exact over short times only
        return times_of(self._step, self._noted, lambda event: start_s + event.seconds_since(self._started), start_s)

    def close(self) -> None:
        """Let the thread end."""
        self._watch.close()

    def _mark(self) -> Event:
        return self._streams.record_event(self._streams.computing(), timed=True)

    def _pass(self, number: int) -> None:
        action, step = self._noted[number].action, self._step  # other threads may ask when this wait is over
        self._inbox.take(
            ("passed", step, number), lambda: Awaited(f"{self._name} to finish {action} of step {step}", by_device=True)
        )


def times_of(step: int, noted: Sequence[Noted], at_s: Callable[[Event], float], begin_s: float) -> StepTimes:
    """Return the times of a step on the device: those of its actions, and of waits for what an action needs."""
    actions, waits, last_s = list[Interval](), list[Interval](), begin_s
    for each in noted:
        began_s, ended_s = at_s(each.began), at_s(each.ended)
        if each.waited and began_s > last_s:
            waits.append(interval_of(each.action, last_s, began_s))
        inside_s = each.sections[1].seconds_since(each.sections[0]) if each.sections else 0.0
        actions.append(interval_of(each.action, began_s, ended_s, inside_s))
        last_s = ended_s
    return StepTimes(step, begin_s, last_s, tuple(actions), tuple(waits))


def lookahead_of(streams: Streams | None, inbox: Inbox) -> Lookahead:
    """Return the lookahead for a device with these streams."""
    return HostLookahead() if streams is None else DeviceLookahead(streams, inbox)
