"""The training thread is one action ahead of its device, and actions take what they take there."""

import threading
from typing import Any

import pytest

from tests.unit.engine.late import LateStreams
from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup
from varuna.core.devices import DeviceFacts
from varuna.core.errors import DeviceError
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.links.traffic import traffic_over
from varuna.engine.pipeline.lookahead import DeviceLookahead, HostLookahead, Noted, lookahead_of, times_of
from varuna.engine.pipeline.timeline import interval_of
from varuna.schedule.actions import Action, Kind

F0, F1, B0 = (Action(0, Kind(kind), number) for kind, number in (("F", 0), ("F", 1), ("B", 0)))


class Gate:
    """An event that a test passes."""

    def __init__(self, at_s: float = 0.0) -> None:
        self.at_s = at_s
        self.open = threading.Event()

    def wait(self) -> None:
        assert self.open.wait(20)

    def passed(self) -> bool:
        return self.open.is_set()

    def seconds_since(self, earlier: "Gate") -> float:
        return self.at_s - earlier.at_s


class Gates(LateStreams):
    """Events of the computation are gates; the first, which begins the step, is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[Gate] = []

    def record_event(self, stream: Any, *, timed: bool = False) -> Any:
        self.gates.append(Gate(float(len(self.gates))))
        if len(self.gates) == 1:
            self.gates[0].open.set()
        return self.gates[-1]


def test_the_action_before_must_be_done_and_no_more() -> None:
    streams, inbox = Gates(), Inbox(Patience(last_s=20))
    pace = DeviceLookahead(streams, inbox)
    pace.begin(0, 0.0)
    begun = threading.Event()

    def act() -> None:
        for action in (F0, F1):
            pace.begin_action()
            pace.end_action(action)
        begun.set()

    thread = threading.Thread(target=act)
    thread.start()
    while len(streams.gates) < 5:  # F1 is launched, though F0 is not done
        pass
    assert not begun.wait(0.05)
    streams.gates[2].open.set()  # the end of F0
    assert begun.wait(20)
    thread.join()
    streams.gates[4].open.set()
    times = pace.finish()
    assert [(took.kind, took.micro_batch) for took in times.actions] == [("F", 0), ("F", 1)]
    assert [took.seconds for took in times.actions] == [1.0, 1.0]
    pace.close()


def test_the_end_of_a_generation_ends_the_wait_for_the_device() -> None:
    streams, inbox = Gates(), Inbox(Patience(last_s=20))
    pace = DeviceLookahead(streams, inbox)
    pace.begin(0, 0.0)
    pace.begin_action()
    pace.end_action(F0)
    inbox.abort(GenerationEnded(0))
    pace.begin_action()
    with pytest.raises(GenerationEnded):
        pace.end_action(F1)
    streams.gates[2].open.set()
    pace.close()


def test_waits_are_what_the_device_stood_still_for() -> None:
    """F1's input was waited for while F0 still ran, and for 2 s beyond; B0's came before F1 was through."""
    noted = [
        Noted(F0, Gate(1.0), Gate(5.0), waited=False),
        Noted(F1, Gate(7.0), Gate(9.0), waited=True),
        Noted(B0, Gate(9.0), Gate(12.0), waited=True),
    ]
    times = times_of(3, noted, lambda event: event.seconds_since(Gate(0.0)), 1.0)
    assert times.actions == (interval_of(F0, 1.0, 5.0), interval_of(F1, 7.0, 9.0), interval_of(B0, 9.0, 12.0))
    assert times.waits == (interval_of(F1, 5.0, 7.0),)
    assert (times.begin_s, times.end_s) == (1.0, 12.0)


def test_a_device_that_does_not_finish_is_to_blame_and_no_link() -> None:
    streams = Gates()
    streams.device = DeviceFacts(name="0102-03", memory_bytes=2**30)
    inbox = Inbox(Patience(forming_s=0.2, told_s=0.1, look_s=0.1))
    lookahead = DeviceLookahead(streams, inbox)
    lookahead.begin(0, 0.0)
    lookahead.begin_action()
    lookahead.end_action(F0)
    with pytest.raises(DeviceError, match=r"waited 0 s for GPU 0102-03 to finish 0F0 of step 0: it hangs"):
        lookahead.finish()
    for gate in streams.gates:
        gate.open.set()
    lookahead.close()


def test_time_within_sections_is_marked_on_a_device_only_if_asked_for() -> None:
    streams = Gates()
    lookahead = DeviceLookahead(streams, Inbox(Patience(last_s=20)))
    lookahead.begin(0, 0.0)
    for times_sections in (False, True):
        lookahead.times_sections = times_sections
        before = len(streams.gates)
        lookahead.begin_action()
        lookahead.computing()
        lookahead.computed()
        for gate in streams.gates:
            gate.open.set()
        lookahead.end_action(F1 if times_sections else F0)
        assert len(streams.gates) - before == (4 if times_sections else 2)
    streams.gates[-1].open.set()
    assert [took.inside_s for took in lookahead.finish().actions] == [0.0, 1.0]
    lookahead.close()


def test_a_cpu_times_what_lies_within_sections() -> None:
    setup = Setup(build=SmallLanguage)
    setup.run(2, 1, steps=1)
    for times in setup.times():
        assert times is not None
        assert all(0 < took.inside_s < took.seconds for took in times.actions)
        assert [phase.kind for phase in times.phases] == ["reduce", "vote", "apply"]
        assert times.end_s <= times.phases[0].begin_s


def test_steps_on_a_device_lie_one_behind_the_other() -> None:
    setup = Setup(build=SmallLanguage, traffic=lambda: traffic_over(LateStreams()))
    setup.run(2, 1, steps=3)
    for times in setup.times():
        assert times is not None
        ends = [took.end_s for took in times.actions]
        assert ends == sorted(ends)
        assert times.step == 2
        assert times.begin_s <= times.actions[0].begin_s
        assert len(times.actions) >= 8


def test_a_cpu_is_never_ahead() -> None:
    assert isinstance(lookahead_of(None, Inbox()), HostLookahead)
