"""An event loop that is held up is noticed, and who did it is named."""

import asyncio
import sys
import threading

import pytest

from varuna.fleet.manager.loop import deaf_s
from varuna.fleet.net.watchdog import Standstill, Watchdog, whereabouts

pytestmark = pytest.mark.timeout(20)


def test_who_holds_the_loop_up_is_named_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, noticed = [100.0], threading.Event()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        noticed.set()

    looked = threading.Event()
    real = sys._current_frames

    def frames() -> object:
        looked.set()
        return real()

    monkeypatch.setattr(sys, "_current_frames", frames)

    async def serve() -> None:
        watchdog = Watchdog(say, clock=lambda: now[0], every_s=0.005)
        assert watchdog.ran_s is None
        watchdog.start(asyncio.get_running_loop())
        assert watchdog.ran_s == 100.0
        now[0] += 7.0
        assert looked.wait(10)  # the loop stands still, here, until the watchdog has looked
        while not noticed.is_set():
            await asyncio.sleep(0.005)
        assert watchdog.ran_s == 107.0
        watchdog.stop()
        assert watchdog.ran_s is None

    asyncio.run(serve())
    [text] = said
    assert text.startswith("the server did not respond for 7.0 s: it was busy in threading.py")


def test_a_place_is_that_of_this_package_with_what_it_called() -> None:
    seen: list[str] = []

    def look(line: str) -> int:
        seen.append(whereabouts(sys._getframe()))
        return len(line)

    async def serve() -> None:
        watchdog = Watchdog(clock=lambda: float(look("")))
        watchdog.start(asyncio.get_running_loop())
        watchdog.stop()

    asyncio.run(serve())
    assert seen[0].startswith("in watchdog.py:")
    assert seen[0].endswith("_tick (test_watchdog.py, look)")
    assert whereabouts(None) == "somewhere"


def test_deaf_time_is_counted_once() -> None:
    assert deaf_s(heard_s=10.0, last_tick_s=10.1, now_s=10.3) == 0.0
    assert deaf_s(heard_s=10.0, last_tick_s=10.9, now_s=11.1) == pytest.approx(1.1)  # it is noticed now, for all of it
    assert deaf_s(heard_s=10.0, last_tick_s=11.1, now_s=11.3) == pytest.approx(0.2)


@pytest.mark.parametrize(("looks", "why"), [(1, "its process stood still"), (2, "it was busy somewhere")])
def test_a_process_that_was_stopped_names_nobody(looks: int, why: str) -> None:
    standstill = Standstill()

    def look(ran_s: float) -> str:
        return standstill.describe_last(ran_s, 112.0, lambda: whereabouts(None))

    assert [look(ran_s=100.0) for _ in range(looks)] == [""] * looks
    assert look(ran_s=112.0).startswith(f"the server did not respond for 12.0 s: {why}")
    assert look(ran_s=112.0) == ""
