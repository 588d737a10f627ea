"""Messages between neighbours and all-reduces, through the engine's own links, groups and copies.

On a GPU they begin and end in its memory, so their times are those of a link with the copies at both of its ends.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from varuna.calibration.samples import RingSamples, Sized
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.transport import Group
from varuna.engine.base.wait_bounds import Awaited, Patience
from varuna.engine.device.host_copies import DONE, HostCopies
from varuna.engine.links.links import Receiver, Sender
from varuna.engine.links.message import Packed
from varuna.engine.links.traffic import TransferPaths

_WAIT_S = 60.0
_TAG = 77
_TIME_BYTES = 8
_TRIO = 3
"""Workers of which the one in the middle has two neighbours, as most stages have."""


class Repeats(NamedTuple):
    """Rounds in which each size is sent."""

    most_rounds: int = 60
    least_rounds: int = 6
    warm_rounds: int = 4
    """before those that count"""
    budget_s: float = 1.5
    """Time for one size; a slow network gets fewer rounds."""

    def rounds(self, seconds: float) -> int:
        """Return the number of rounds of something that takes ``seconds``."""
        return max(self.least_rounds, min(self.most_rounds, int(self.budget_s / max(seconds, 1e-6))))


_CALIBRATION = Repeats()


class Peers:
    """All workers that measure, in step with one another."""

    def __init__(self, store: Any, rank: int, size: int, host: str, pace: Repeats = _CALIBRATION) -> None:
        self.rank, self.size, self._pace = rank, size, pace
        self._store, self._endpoint = store, Endpoint(host)
        self._group = Group(store, "calibrate/world", rank, size, self._endpoint) if size > 1 else None

    def meet(self) -> None:
        """Return once everybody is here."""
        if self._group is not None:
            self._group.all_reduce(torch.zeros(1))

    def agree(self, value: float) -> float:
        """The largest of all workers' values."""
        if self._group is None:
            return value
        table = torch.zeros(self.size, dtype=torch.float64)
        table[self.rank] = value
        self._group.all_reduce(table)
        return float(table.max())

    def messages(self, sizes: Sequence[int], traffic: TransferPaths) -> tuple[Sized, ...]:
        """One-way times of messages from a neighbour, while as many go the other way.

        Even ranks pair with the next; a last one without partner only waits. Pairs meet before each message: after a
        slow one, which it cannot overtake, its time would hold the delays of both. Each carries when it was sent by
        its sender's clock; the clocks differ by half of what the fastest messages of both directions differ by.

        Args:
            sizes: in bytes, over 8; the smallest tells the clocks' difference.
            traffic: of this worker's device.
        """
        if self._group is None:
            return ()
        self.meet()
        peer = self.rank ^ 1
        raw: list[Sized] = []
        if peer < self.size:
            raw = self._swap_all(sizes, traffic)
        else:
            for _ in sizes:
                self.agree(0.0)
        fastest = torch.zeros(self.size, dtype=torch.float64)
        fastest[self.rank] = min((seconds for size, seconds in raw if size == min(sizes)), default=0.0)
        self._group.all_reduce(fastest)
        if not raw:
            return ()
        offset_s = float(fastest[self.rank] - fastest[peer]) / 2
        return tuple(Sized(size, max(0.0, seconds - offset_s)) for size, seconds in raw)

    def _swap_all(self, sizes: Sequence[int], traffic: TransferPaths) -> list[Sized]:
        """Swap messages of every size with the neighbour; seconds from the sender's clock to ours."""
        number, place = divmod(self.rank, 2)
        kind = "pair" if traffic.streams is None else "staged"
        pair = Group(self._store, f"calibrate/{kind}{number}", place, 2, self._endpoint)
        samples: list[Sized] = []
        for tag, size in zip(count(_TAG, 2), sizes, strict=False):
            begin_s = time.monotonic()
            _swap_many(pair, 1 - place, tag, size, self._pace.warm_rounds, traffic)
            rounds = self._pace.rounds(self.agree((time.monotonic() - begin_s) / self._pace.warm_rounds))
            samples += [Sized(size, seconds) for seconds in _swap_many(pair, 1 - place, tag + 1, size, rounds, traffic)]
        return samples

    def line(self, sizes: Sequence[int]) -> tuple[Sized, ...]:
        """Seconds until messages of two neighbours are here, which begin together, while as many go to them.

        The second of the first three workers tells, with the bytes of both; others find nothing.

        Args:
            sizes: of one message, in bytes.
        """
        if self._group is None or self.size < _TRIO:
            return ()
        self.meet()
        trio = None
        if self.rank < _TRIO:
            trio = Group(self._store, "calibrate/line", self.rank, _TRIO, self._endpoint)
        samples: list[Sized] = []
        for tag, size in zip(count(_TAG, 2), sizes, strict=False):
            begin_s = time.monotonic()
            _swap_with_neighbours(trio, self.rank, tag, size, self._pace.warm_rounds)
            rounds = self._pace.rounds(self.agree((time.monotonic() - begin_s) / self._pace.warm_rounds))
            taken_s = _swap_with_neighbours(trio, self.rank, tag + 1, size, rounds)
            samples += [Sized(2 * size, seconds) for seconds in taken_s]
        return tuple(samples) if self.rank == 1 else ()

    def rings(self, sizes: Sequence[int], copies: HostCopies) -> tuple[RingSamples, ...]:
        """All-reduce over D = 2 and all workers, with one ring and with as many as there is room for; by ``copies``."""
        if self._group is None:
            return ()
        shapes = {(ranks, k) for ranks in {2, self.size} for k in {1, self.size // ranks}}
        return tuple(self._ring(ranks, in_flight, sizes, copies) for ranks, in_flight in sorted(shapes))

    def _ring(self, ranks: int, in_flight: int, sizes: Sequence[int], copies: HostCopies) -> RingSamples:
        number, place = divmod(self.rank, ranks)
        takes_part = number < in_flight
        group = None
        if takes_part:
            name = f"calibrate/ring{ranks}x{in_flight}/{number}"
            group = Group(self._store, name, place, ranks, self._endpoint)
        samples = []
        for size in sizes:
            values = copies.copy_to_device({"sums": torch.zeros(max(1, size // 4))})["sums"]
            taken_s = 0.0
            for _ in range(self._pace.warm_rounds):
                self.meet()
                taken_s = _reduce(group, values, copies)
            for _ in range(self._pace.rounds(self.agree(taken_s))):
                self.meet()
                taken_s = _reduce(group, values, copies)
                if group is not None:
                    samples.append(Sized(values.numel() * 4, taken_s))
        return RingSamples(in_flight=in_flight, ranks=ranks, samples=tuple(samples))


def _swap_many(pair: Group, peer: int, tag: int, size_bytes: int, rounds: int, traffic: TransferPaths) -> list[float]:
    """Swap messages with ``peer``, one at a time; seconds that each of the peer's took, by both clocks.

    The time at which it was sent is written by the host, as digests of samples are. The rest begins and ends on the
    device, if it has a memory of its own; to pack it on a CPU is part of the action that sends it, not of the link.
    """
    inbox, copies = Inbox(Patience(last_s=_WAIT_S)), traffic.links
    body = copies.copy_to_device({"body": torch.zeros(size_bytes - _TIME_BYTES, dtype=torch.uint8)})["body"]
    sender = Sender(pair, peer, tag, inbox, f"with rank {peer}")
    Receiver(pair, peer, tag, inbox, f"with rank {peer}", [(number, size_bytes) for number in range(rounds)], copies)
    taken_s = []
    for number in range(rounds):
        pair.all_reduce(torch.zeros(1))  # both have the messages before
        buffer = copies.room(size_bytes).zero_()
        pairs = [(body, buffer[_TIME_BYTES:])] if traffic.streams is not None else []
        buffer[:_TIME_BYTES].view(torch.float64)[0] = time.monotonic()
        sender.send(Packed(buffer, copies.copy_to_host(pairs)))
        received: torch.Tensor = inbox.take(number, lambda: Awaited("a message of the calibration", (peer,)))
        copies.copy_to_device({"body": received[_TIME_BYTES:]})
        copies.point().wait()
        taken_s.append(time.monotonic() - float(received[:_TIME_BYTES].view(torch.float64)[0]))
    sender.close()
    return taken_s


def _swap_with_neighbours(trio: Group | None, rank: int, tag: int, size_bytes: int, rounds: int) -> list[float]:
    """Send to the ranks before and after this one at once; seconds until what they sent meanwhile is here."""
    if trio is None:
        return []
    inbox, neighbours = Inbox(Patience(last_s=_WAIT_S)), [each for each in (rank - 1, rank + 1) if 0 <= each < _TRIO]
    senders = []
    for peer in neighbours:
        senders.append(Sender(trio, peer, tag, inbox, f"with rank {peer}"))
        coming = [((peer, number), size_bytes) for number in range(rounds)]
        Receiver(trio, peer, tag, inbox, f"with rank {peer}", coming)
    message, taken_s = torch.zeros(size_bytes, dtype=torch.uint8), []
    for number in range(rounds):
        trio.all_reduce(torch.zeros(1))  # all have the messages before
        begin_s = time.monotonic()
        for sender in senders:
            sender.send(Packed(message, DONE))
        for peer in neighbours:
            inbox.take((peer, number), lambda peer=peer: Awaited("a message of the calibration", (peer,)))  # type: ignore[misc]
        taken_s.append(time.monotonic() - begin_s)
    for sender in senders:
        sender.close()
    return taken_s


def _reduce(group: Group | None, values: torch.Tensor, copies: HostCopies) -> float:
    begin_s = time.perf_counter()
    if group is not None:
        with copies.at_host(values, copies.point(), copies.room_for) as summed:
            group.all_reduce(summed)
    return time.perf_counter() - begin_s
