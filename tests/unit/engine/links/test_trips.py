import math
import time

import pytest
import torch

from varuna.engine.links import trips as module
from varuna.engine.links.trips import STAMP_BYTES, WINDOW, Trips


class Ends:
    """Two hosts whose clocks differ, and a line between them; time passes as messages travel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offset_s: float) -> None:
        self.now_s, self.offset_s = 1000.0, offset_s
        self.here, self.there = Trips(), Trips()
        self._reading_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._reading_s)

    def send(self, seconds: float, size_bytes: int = 500, *, back: bool = False) -> None:
        sender, receiver = (self.there, self.here) if back else (self.here, self.there)
        message = torch.zeros(size_bytes + STAMP_BYTES, dtype=torch.uint8)
        self._reading_s = self.now_s + (self.offset_s if back else 0.0)
        sender.stamp(message)
        self.now_s += seconds
        receiver.note_arrival(message, size_bytes, self.now_s + (0.0 if back else self.offset_s))


@pytest.mark.parametrize("offset_s", [0.0, 3600.0, -0.25])
def test_both_ends_find_the_way_one_way_whatever_their_clocks_say(
    monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    ends = Ends(monkeypatch, offset_s)
    for _ in range(3):
        ends.send(0.04)
        ends.send(0.06, back=True)
    for found in (ends.here.drain(), ends.there.drain()):
        assert found
        assert all(trip.size_bytes == 500 for trip in found)
        assert [trip.seconds for trip in found] == pytest.approx([0.05] * len(found))
    assert ends.here.drain() == []


def test_nothing_is_said_before_messages_went_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch, 7.0)
    for _ in range(5):
        ends.send(0.04)
    assert ends.here.drain() == ends.there.drain() == []


def test_messages_that_waited_for_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch, 0.0)
    for seconds in (0.04, 0.4, 0.9):
        ends.send(seconds)
        ends.send(seconds, back=True)
    assert ends.here.drain()[-1].seconds == pytest.approx(0.04)


def test_a_line_that_has_become_slower_is_found_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch, 0.0)
    ends.send(0.04)
    ends.send(0.04, back=True)
    for _ in range(WINDOW + 1):
        ends.send(0.2)
        ends.send(0.2, back=True)
    assert ends.here.drain()[-1].seconds == pytest.approx(0.2)


def test_what_nobody_takes_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(monkeypatch, 0.0)
    for _ in range(module.KEPT + 10):
        ends.send(0.04)
        ends.send(0.04, back=True)
    found = ends.here.drain()
    assert len(found) == module.KEPT
    assert all(math.isfinite(trip.seconds) for trip in found)
