"""A device's epoll instance is told from all others, whose numbers come and go."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator

import pytest

from varuna.engine.base.peer_sockets import with_epoll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")


class Device:
    """Like one of gloo's: an epoll instance, and a pipe that wakes its thread; it closes the instance first."""

    def __init__(self) -> None:
        self.epoll, (self.end, self.other) = select.epoll(), os.pipe()
        self.number, self.pipe = self.epoll.fileno(), os.fstat(self.end).st_ino
        self.epoll.register(self.end)

    def close(self) -> None:
        self.epoll.close()
        for end in (self.end, self.other):
            with contextlib.suppress(OSError):
                os.close(end)


@pytest.fixture
def made() -> Iterator[list[Device]]:
    devices: list[Device] = []
    yield devices
    for device in devices:
        device.close()


def test_each_device_has_its_own(made: list[Device]) -> None:
    for _ in range(3):
        device, epoll = with_epoll(Device)
        made.append(device)
        assert epoll == (device.number, device.pipe)


def test_a_device_that_gets_the_number_of_one_that_has_yet_to_close_its_pipe(made: list[Device]) -> None:
    made.append(with_epoll(Device)[0])
    made[0].epoll.close()
    device, epoll = with_epoll(Device)
    made.append(device)
    assert device.number == made[0].number
    assert epoll == (device.number, device.pipe)


def test_a_device_that_gets_the_number_of_one_that_ends_meanwhile(made: list[Device]) -> None:
    old, _ = with_epoll(Device)

    def instead() -> Device:
        old.close()
        return Device()

    device, epoll = with_epoll(instead)
    made.append(device)
    assert device.number == old.number
    assert epoll == (device.number, device.pipe)


def test_two_at_once_are_not_told_apart(made: list[Device]) -> None:
    def both() -> None:
        made.extend([Device(), Device()])

    assert with_epoll(both) == (None, None)
