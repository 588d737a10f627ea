"""Threads that work through a queue, and do not outlive the block, nor hold up the end of the process."""

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from varuna.process.threads import AbandoningThreadPool


def test_a_crew_gives_results_and_errors_to_whoever_asks() -> None:
    with AbandoningThreadPool(2, "test") as crew:
        futures = [crew.submit(divmod, 7, number) for number in (2, 0)]
        assert futures[0].result(5) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            futures[1].result(5)


def test_what_waits_when_the_block_ends_is_dropped_and_what_runs_is_waited_for() -> None:
    begun, may_end, done = threading.Event(), threading.Event(), list[int]()
    dropped: list[Future[None]] = []

    def first() -> None:
        begun.set()
        may_end.wait(5)
        done.append(1)

    def fail() -> None:
        with AbandoningThreadPool(1, "test") as crew:
            crew.submit(first)
            dropped.append(crew.submit(done.append, 2))
            begun.wait(5)
            threading.Timer(0.05, may_end.set).start()
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fail()
    assert done == [1]
    assert dropped[0].cancelled()


def test_work_that_never_ends_does_not_hold_up_the_process() -> None:
    program = """
import sys, threading
from varuna.process.threads import AbandoningThreadPool
begun = threading.Event()
def work():
    begun.set()
    threading.Event().wait()
AbandoningThreadPool(1, "test").submit(work)
begun.wait(5)
sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=20, check=False).returncode == 3
