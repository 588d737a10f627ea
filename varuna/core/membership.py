"""The seam between the engine and what decides on membership.

The engine runs generations; a ``Membership`` hands it assignments. Two ship: ``varuna.membership.static`` (one
process, or torchrun's fixed world) and ``varuna.membership.managed`` (the manager's client).
"""

from collections.abc import Callable
from typing import Any, Protocol

from varuna.core.devices import DeviceFacts, DeviceFault
from varuna.core.messages import Apply, Assign, Beat, Finish, Flag, Shown, ShowRequest, StopReport, TrainingOver, Vote
from varuna.core.model import JobFacts
from varuna.core.saved import SavedShard

Directive = Assign | Apply | Finish | TrainingOver


class Membership(Protocol):
    """Decides who is in the run. All methods but ``next_directive`` return at once; any thread may call them."""

    @property
    def worker(self) -> str:
        """This worker's name, unique within the run."""
        ...

    @property
    def survives(self) -> bool:
        """Whether a broken generation is replaced by a new one; if not, a broken link ends the run."""
        ...

    @property
    def recorded_step(self) -> int:
        """Newest step whose vote the other side has on disk; -1 before any."""
        ...

    @property
    def measures(self) -> bool:
        """Whether plans want to know what this worker's sections take, before it joins."""
        ...

    def offer_calibrations(self, calibrations: str) -> None:
        """Offer calibrations to plan with (JSON of a ``calibration.format.Calibrations``); before ``join``."""
        ...

    def join(
        self,
        job: JobFacts,
        *,
        device: DeviceFacts | None = None,
        device_class: str = "",
        beat: Callable[[], Beat],
        on_hold: Callable[[int], None],
        on_flag: Callable[[int, Flag], None],
        on_show: Callable[[ShowRequest], None] = ...,
    ) -> None:
        """Announce a warm worker. The callbacks run on the membership's own thread.

        Args:
            job: facts of the job, equal on all workers.
            device: that this worker computes on, if it has memory of its own.
            device_class: of that device; empty: unknown.
            beat: what to send as the next heartbeat.
            on_hold: called with the generation that has to stop.
            on_flag: called with a generation and the flag that its next vote should carry (rank 0 only).
            on_show: called with what people ask to see of this worker's steps; the answer is for ``shown``.

        Raises:
            FleetError: refused, with the manager's reason.
        """
        ...

    def next_directive(self) -> Directive:
        """Block until there is something to do.

        Raises:
            FleetError: the manager is gone and the run cannot go on without it.
        """
        ...

    def store(self, generation: int) -> Any:
        """Return the store where members of a generation find each other: ``set``, ``check``, ``get``; keys stay."""
        ...

    def held(self, held: StopReport) -> None:
        """Answer a hold (or report that the regroup flag stopped this worker)."""
        ...

    def voted(self, vote: Vote) -> None:
        """Report a committed step (rank 0 of the generation)."""
        ...

    def suspect(self, generation: int, reason: str, fault: DeviceFault | None = None, peer: int | None = None) -> None:
        """Report evidence that a peer is gone, or cannot be reached, or a fault of this worker's own device."""
        ...

    def saved(self, shard: SavedShard) -> None:
        """Report a durable shard."""
        ...

    def unsaved(self, reason: str) -> None:
        """Report, and print, that this worker's part of a checkpoint is not written."""
        ...

    def shown(self, answer: Shown) -> None:
        """Answer a request to see a step."""
        ...

    def failed(self, summary: str, traceback: str, exit_code: int, fault: DeviceFault | None = None) -> None:
        """Report an exception of this worker's own code, or a fault of its device; returns once it is out (bounded)."""
        ...

    def leaving(self, step: int) -> None:
        """Report the end of the loop after ``step`` committed steps; returns once it is out (bounded)."""
        ...

    def close(self) -> None:
        """Drop the connection to the manager or the peers."""
        ...
