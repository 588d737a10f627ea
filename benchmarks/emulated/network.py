"""An emulated network under a real one: every large message passes a FIFO delay line before the real one gets it.

Imports torch only: the peers' environment, which has no Varuna, uses it too.
"""

import contextlib
import os
import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple


class Network(NamedTuple):
    """A link, in units of one forward of a stage."""

    latency: float
    serialisation: float
    jitter: float
    """mean of an exponential delay added to every message; messages of a link stay in order"""


NETWORKS = {
    "none": Network(0.0, 0.0, 0.0),
    "good": Network(0.05, 0.2, 0.05),
    "mid": Network(0.05, 0.4, 0.2),
    "bad": Network(0.1, 0.4, 0.5),
}


def run_on_time() -> None:
    """Let this rank's threads run as soon as their sleep is over, whatever else runs, where that is allowed.

    Ranks that sleep hardly compute, so nothing else suffers; call it after imports and before threads are started.
    """
    with contextlib.suppress(AttributeError, PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


LARGE_BYTES = 4096
"""Smaller messages are control, and pass at once."""


class Passing:
    """A message on its way; the sender may wait until the receiver has it."""

    def __init__(self) -> None:
        self._through = threading.Event()

    def wait(self, timeout: object = None) -> bool:
        return self._through.wait()

    synchronize = wait

    def is_completed(self) -> bool:
        return self._through.is_set()

    def arrive(self) -> None:
        self._through.set()


Line = queue.SimpleQueue[tuple[float, Callable[[], Any], Passing, float]]


class Lines(ABC):
    """One line for each destination of this rank, on which messages stay in order."""

    def __init__(self) -> None:
        self._lines: dict[object, Line] = {}

    def send(self, destination: object, hand_over: Callable[[], Any], share: float = 1.0) -> Passing:
        """Queue a message; ``hand_over`` gives it to the real network once it has passed the line, and waits.

        ``share``: of a full message's serialisation.
        """
        if destination not in self._lines:
            self._lines[destination] = queue.SimpleQueue()
            threading.Thread(target=self._pump, args=(self._lines[destination],), daemon=True).start()
        passing = Passing()
        self._lines[destination].put((time.perf_counter(), hand_over, passing, share))
        return passing

    @abstractmethod
    def _pump(self, line: Line) -> None:
        """Hand over what is queued, each message when it is due."""


class DelayLines(Lines):
    """Lines of an emulated network."""

    def __init__(self, network: Network, unit_s: float, seed: int) -> None:
        super().__init__()
        self._network, self._unit_s = network, unit_s
        self._random = random.Random(seed)

    def _pump(self, line: Line) -> None:
        latency, serialisation, jitter = self._network
        free_s = arrival_s = 0.0
        while True:
            entered_s, hand_over, passing, share = line.get()
            free_s = max(entered_s, free_s) + share * serialisation * self._unit_s
            late = self._random.expovariate(1 / jitter) if jitter else 0.0
            arrival_s = max(arrival_s, free_s + (latency + late) * self._unit_s)
            time.sleep(max(0.0, arrival_s - time.perf_counter()))
            hand_over()
            passing.arrive()


def delay_sends(group: Any, network: Network, unit_s: float, seed: int, message_bytes: int | None = None) -> None:
    """Make every large ``group.send(tensors or tensor, destination, tag)`` pass a delay line.

    Args:
        group: a class of groups, torch's or ours.
        network: what to emulate; nothing changes for one without delays.
        unit_s: seconds of one forward.
        seed: of the jitter.
        message_bytes: what the network's serialisation is of; every message then takes its share, also small ones.
            None: the same for every large message.
    """
    if not any(network):
        return
    lines, real = DelayLines(network, unit_s, seed), group.send

    def send(self: Any, given: Any, destination: int, tag: int) -> Any:
        tensor = given[0] if isinstance(given, list) else given
        size = tensor.numel() * tensor.element_size()
        if message_bytes is None and size < LARGE_BYTES:
            return real(self, given, destination, tag)
        kept = tensor.detach().clone()  # the caller may write to its own again
        kept = [kept] if isinstance(given, list) else kept
        share = 1.0 if message_bytes is None else size / message_bytes
        return lines.send((id(self), destination), lambda: real(self, kept, destination, tag).wait(), share)

    group.send = send
