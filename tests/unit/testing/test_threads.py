"""Threads of a run are waited for together, and never for ever."""

import threading
from functools import partial

import pytest

from varuna.core.errors import WorkerError
from varuna.testing.threads import Threads, run_all


def refuse(reason: str) -> None:
    raise ValueError(reason)


@pytest.fixture
def end() -> threading.Event:
    """Ends threads that wait."""
    return threading.Event()


def test_all_works_run_at_once() -> None:
    meeting = threading.Barrier(3)
    run_all([partial(meeting.wait, 10)] * 3)
    run_all([])


def test_the_first_error_is_raised_though_another_thread_waits(end: threading.Event) -> None:
    with pytest.raises(ValueError, match="lost"):
        run_all([end.wait, partial(refuse, "lost"), end.wait])
    end.set()


def test_a_thread_that_does_not_end_is_named_with_its_place(end: threading.Event) -> None:
    threads = Threads()
    threads.start("worker w1", end.wait)
    with pytest.raises(WorkerError, match=r"worker w1 has not ended within 0\.05 s\. It is here:\n(.|\n)*wait"):
        threads.join(0.05)
    end.set()
    threads.join(10)
    assert threads.errors == []
