"""What belongs to one generation ends with it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.engine.ranks import Setup, close_sessions, reaped


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_what_a_generation_held_goes_when_it_ends_and_not_once_python_looks_for_circles() -> None:
    setup = Setup()
    setup.run(2, 2, steps=2)
    held: list[weakref.ref[Any]] = []
    for session in setup.finished:
        assert session.current is not None
        held += map(weakref.ref, (session.current.runtime, session.current.groups.world))
    close_sessions()
    reaped(5.0, "varuna-loader", "varuna-send", "varuna-receive")  # which are ending
    assert [each() for each in held if each() is not None] == []
