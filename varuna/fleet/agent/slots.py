"""Places for workers on one machine, and when to start a worker in each. Pure: time is an argument."""

from dataclasses import dataclass

from varuna.core.devices import rest_s

_STABLE_S, _WELL_S = 60.0, 600.0
"""A worker that ran for so long was started well, and its machine was whole again."""
_LONGEST_DELAY_S = 30.0


@dataclass
class Slot:
    """A place for one worker; with GPUs, one GPU."""

    index: int
    worker: str = ""
    started_s: float = 0.0
    start_at_s: float = 0.0
    failures: int = 0
    is_done: bool = False
    """The last worker ended by itself: nobody follows it."""
    broke: bool | None = None
    """Its device or machine has failed, as its worker said: broke, or was too small (False). Another one follows after
    a rest, however the process ends."""
    faults: int = 0
    """Number of faults of its device or machine, each soon after the one before."""


class Slots:
    """A worker that was killed is followed by another, ever more slowly; one that ended by itself is not."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(index) for index in range(count)]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def workers(self) -> list[str]:
        """Names of workers that run."""
        return [slot.worker for slot in self._slots if slot.worker]

    @property
    def all_done(self) -> bool:
        """Whether nothing will ever be started again."""
        return bool(self._slots) and all(slot.is_done for slot in self._slots)

    def due(self, now_s: float) -> list[Slot]:
        """Slots in which a worker should be started now."""
        return [slot for slot in self._slots if not slot.worker and not slot.is_done and now_s >= slot.start_at_s]

    def started(self, slot: Slot, worker: str, now_s: float) -> None:
        """Note that a worker runs in a slot."""
        slot.worker, slot.started_s = worker, now_s

    def failed(self, worker: str, *, is_memory: bool = False) -> None:
        """Note that a worker's device failed, or may have: one that broke gets no other worker for a while."""
        for slot in self._slots:
            if slot.worker == worker and slot.broke is None:
                slot.broke = not is_memory

    def ended(self, worker: str, code: int, now_s: float) -> bool:
        """Note that a process ended, by a signal if ``code`` is negative; False if it was in no slot."""
        slot = next((slot for slot in self._slots if slot.worker == worker), None)
        if slot is None:
            return False
        slot.worker = ""
        if slot.broke is not None:
            if slot.broke:
                slot.faults = 1 if now_s > slot.started_s + _WELL_S else slot.faults + 1
            slot.start_at_s, slot.broke = now_s + (rest_s(slot.faults) if slot.broke else 0.0), None
        elif code >= 0:
            slot.is_done = True
        else:
            slot.failures = 0 if now_s > slot.started_s + _STABLE_S else slot.failures + 1
            slot.start_at_s = now_s + (min(_LONGEST_DELAY_S, 2.0 ** (slot.failures - 2)) if slot.failures > 1 else 0.0)
        return True

    def begin_anew(self) -> None:
        """Begin another run: slots whose workers ended by themselves are used again."""
        for slot in self._slots:
            slot.is_done, slot.failures, slot.start_at_s = False, 0, 0.0
            slot.broke, slot.faults = None, 0
