"""A device that does nothing any more is noticed, whatever the training thread waits in."""

import queue
import threading
import time
from typing import Any

from tests.unit.engine.late import LateStreams
from varuna.core.devices import DeviceFacts
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.device.pulse import Pulse

PATIENCE = Patience(look_s=0.02, stalled_s=0.2, forming_s=0.2)
GPU = DeviceFacts(name="0102-03", memory_bytes=2**30)


class Hanging(LateStreams):
    """Points of its streams are passed until it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.marks, self.works = GPU, 0, threading.Event()
        self.works.set()

    def record_event(self, stream: Any, *, timed: bool = False) -> Any:
        self.marks += 1
        return self

    def wait(self) -> None:
        time.sleep(0.06)  # so that it is looked at meanwhile
        assert self.works.wait(20)


def test_a_device_that_hangs_ends_the_process_and_is_named() -> None:
    streams, inbox = Hanging(), Inbox(PATIENCE, who="rank 1 (stage 1)")
    told: queue.SimpleQueue[tuple[DeviceFacts | None, str]] = queue.SimpleQueue()
    Pulse(streams, inbox, lambda device, why: told.put((device, why)))
    time.sleep(0.8)  # four times the bound
    assert told.empty()
    assert streams.marks > 1
    streams.works.clear()
    device, why = told.get(timeout=20)
    assert device == GPU
    assert why.startswith("rank 1 (stage 1): GPU 0102-03 has not finished in 0 s what it was given")
    inbox.abort(GenerationEnded(0))
    streams.works.set()


def test_an_error_that_a_device_reports_ends_the_waits_of_its_rank() -> None:
    class Broken(Hanging):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    inbox = Inbox(PATIENCE)
    Pulse(Broken(), inbox, lambda device, why: None)
    assert inbox.over.wait(20)
