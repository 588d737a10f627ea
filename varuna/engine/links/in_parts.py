"""Large values that cross to other ranks in parts, through little host memory: while some are on their way, the next
one leaves the device.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from varuna.core.devices import STAGING_BYTES
from varuna.engine.base.transport import Group, Work

PART_BYTES = 4 * 2**20
_AHEAD = 2

Room = Callable[[int], Tensor]
"""Allocates that many bytes of host memory, from and to which a device copies."""


def part_bytes_for(lines: int) -> int:
    """Return bytes of a part if a rank has parts of ``lines`` under way at once; whole pages: tensors stay aligned."""
    return max(4096, min(PART_BYTES, STAGING_BYTES // (_AHEAD * max(1, lines)) // 4096 * 4096))


def spans_of(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each part, and the one after its last."""
    return ((first, min(size_bytes, first + part_bytes)) for first in range(0, size_bytes, part_bytes))


class Outgoing:
    """Sends parts to ``peers``, each of which gets all of them."""

    def __init__(self, group: Group, peers: Sequence[int], part_bytes: int, room: Room) -> None:
        self._group, self._peers = group, peers
        self._free = deque(room(part_bytes) for _ in range(_AHEAD if peers else 0))
        self._going: deque[tuple[Tensor, list[Work]]] = deque()

    def send(self, tag: int, size_bytes: int, fill: Callable[[Tensor], object]) -> None:
        """Send what ``fill`` puts into a part of that size; blocks while all memory is on its way.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        if not self._free:
            # The oldest: parts to one peer and tag arrive in the order in which they were sent.
            self._wait_for_one()
        room = self._free.popleft()
        part = room[:size_bytes]
        fill(part)
        self._going.append((room, [self._group.send(part, peer, tag) for peer in self._peers]))

    def finish(self) -> None:
        """Wait until everything has been sent.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        while self._going:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        room, works = self._going.popleft()
        for work in works:
            work.wait()
        self._free.append(room)


class Incoming:
    """Parts from ``peer``, of which some are always asked for: an answer need not wait for a question."""

    def __init__(self, group: Group, peer: int, tag: int, sizes_bytes: Sequence[int], room: Room) -> None:
        self._group, self._peer, self._tag = group, peer, tag
        self._sizes = deque(sizes_bytes)
        self._coming: deque[tuple[Tensor, Work]] = deque()
        for size_bytes in sizes_bytes[:_AHEAD]:
            self._ask(room(size_bytes))

    def take_part(self, use: Callable[[Tensor], object]) -> None:
        """Wait for the next part; once ``use`` returns, its memory gets another one.

        Raises:
            RuntimeError: as ``Work.wait``.
        """
        room, work = self._coming.popleft()
        # Only then is the next one asked for: it comes into the memory that ``use`` has read.
        use(work.wait())
        if self._sizes:
            self._ask(room)

    def _ask(self, room: Tensor) -> None:
        self._coming.append((room, self._group.receive(room[: self._sizes.popleft()], self._peer, self._tag)))
