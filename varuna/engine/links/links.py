"""Links: one channel per direction per neighbour, each with a thread of its own.

rank r                                                      rank r + 1 (activations), r - 1 (gradients)
training thread          "ready"               "send"       "receive"               training thread
send(message)
  a GPU still writes it: waits for the copy                 posts receives ahead
  else: group.send       group.send ~~~~~~ bytes ~~~~~~~~>  work.wait()
                                               work.wait()  inbox.put(key) ------>  takes it: a place
inbox.stir() <-------------------------- it is through                              is free again

A send waits for its receive, and both for the network. These waits are in disposable threads, and the training thread
never blocks on them. Messages of a link have a fixed order: their keys are (kind, step, global micro-batch).
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from itertools import islice

from torch import Tensor

from varuna.core.errors import LinkError
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.transport import Group, Work
from varuna.engine.device.faults import kind_of
from varuna.engine.device.host_copies import CPU_COPIES, DONE, HostCopies
from varuna.engine.links.gpu_links import GpuChannel
from varuna.engine.links.message import DeviceMessage, Packed
from varuna.engine.links.transfer_time import TransferTime
from varuna.engine.links.trips import Trips
from varuna.process.threads import start
from varuna.schedule.buffers import ACTIVATIONS_COMING

Expected = tuple[Hashable, int] | tuple[Hashable, int, int]
"""A message that will come: its key, its size in bytes, and that of a body that travels by itself, if it has one."""

_ARRIVALS_REMEMBERED = 20_000


class Sender:
    """Sends buffers to one peer in the order given.

    Every message is on its way as soon as it is ready; a thread waits for each to be through, and keeps it until
    then. Were the next one only started after that wait, each would pay the link's latency again. Messages that a
    GPU is still writing are waited for by a thread of their own, for the same reason.

    A body in device memory goes by ``channel`` once its header has been received: the peer has room for it then.
    """

    def __init__(
        self,
        group: Group,
        peer: int,
        tag: int,
        inbox: Inbox,
        name: str,
        channel: GpuChannel | None = None,
        *,
        trips: Trips | None = None,
    ) -> None:
        """Start the thread.

        Args:
            group: the generation's world group.
            peer: rank of the receiver.
            tag: keeps directions apart.
            inbox: is stirred when a message is through, and ends when the link breaks.
            name: for errors.
            channel: by which bodies in device memory go.
            trips: gets a stamp into every message, which has room for it at its end.
        """
        self._group, self._peer, self._tag, self._inbox, self._name = group, peer, tag, inbox, name
        self._channel, self._trips = channel, trips
        self._under_way: queue.SimpleQueue[tuple[Work, Packed, TransferTime] | None] = queue.SimpleQueue()
        self._unready: queue.SimpleQueue[Packed | None] | None = None  # once there was such a message
        self._begun: list[TransferTime] = []
        self._given = self._through = 0  # each is written by one thread
        start(f"send-{name}", self._run)

    @property
    def waiting(self) -> int:
        """Messages that the peer has not taken yet; the inbox is stirred when it takes one."""
        return self._given - self._through

    def send(self, message: Packed) -> None:
        """Start to send; returns at once. The buffer must not be written any more."""
        self._given += 1
        if self._unready is None and message.ready is not DONE:
            self._unready = queue.SimpleQueue()
            # From now on all messages go through it, ready or not: the peer expects them in the order given.
            start(f"ready-{self._name}", self._start_when_ready)
        if self._unready is None:
            self._start(message)
        else:
            self._unready.put(message)

    def take_begun(self) -> list[TransferTime]:
        """Take all messages since the last call, in the order in which they were given; the last may be under way.

        For a moment at which the peer has taken them all.
        """
        begun, self._begun = self._begun, []
        return begun

    def close(self) -> None:
        """Let the threads end once everything is sent or the group is abandoned."""
        (self._under_way if self._unready is None else self._unready).put(None)

    def _start(self, message: Packed) -> None:
        try:
            if self._trips is not None:
                self._trips.stamp(message.buffer)
            carry = TransferTime(message.buffer.nbytes, time.monotonic())  # first: the peer may act on it at once
            work = self._group.send(message.buffer, self._peer, self._tag)
            self._begun.append(carry)
            self._under_way.put((work, message, carry))
        except RuntimeError as error:
            self._broke(error)

    def _start_when_ready(self) -> None:
        assert self._unready is not None
        while (message := self._unready.get()) is not None and not self._inbox.ended:
            try:
                message.whole()
            except Exception as error:  # noqa: BLE001 - see _broke
                self._broke(error)
                break
            self._start(message)
            del message  # the thread that waits for it to be through keeps it as long as it must
        self._under_way.put(None)

    def _run(self) -> None:
        try:
            while (item := self._under_way.get()) is not None:
                work, message, carry = item
                # Waits are one after another, transfers are not: all that were started are under way.
                work.wait()
                if self._channel is not None and message.body is not None:
                    self._channel.send(message.body)
                    carry.size_bytes += message.body.nbytes
                carry.end_s = time.monotonic()
                # Before the next wait, which may be long: this frees the message's memory.
                del work, message, item
                self._through += 1
                self._inbox.stir()
        except Exception as error:  # noqa: BLE001 - see _broke
            self._broke(error)

    def _broke(self, error: Exception) -> None:
        self._inbox.abort(_failure(error, f"the link {self._name} broke while sending"))


class Receiver:
    """Receives the messages that a peer will send, in their known order, and puts each into the inbox."""

    def __init__(
        self,
        group: Group,
        peer: int,
        tag: int,
        inbox: Inbox,
        name: str,
        expected: Iterable[Expected | None],
        copies: HostCopies = CPU_COPIES,
        channel: GpuChannel | None = None,
        *,
        places: int | None = None,
        trips: Trips | None = None,
    ) -> None:
        """Start receiving.

        Args:
            group: the generation's world group.
            peer: rank of the sender.
            tag: keeps directions apart.
            inbox: where messages go.
            name: for errors.
            expected: every message of the generation, in order; may be endless. None: what comes next may take a while
                to find out, and is asked for once everything before has come.
            copies: gives the host memory that messages come into; plain by default.
            channel: by which bodies in device memory come. Room for one is there before its header is asked for.
            places: most messages that may come or wait to be taken; the others stay with the peer. None: any number may
                wait.
            trips: reads the stamp in every message.
        """
        self._group, self._peer, self._tag, self._inbox, self._name = group, peer, tag, inbox, name
        self._expected, self._copies, self._channel = expected, copies, channel
        self._places, self._trips = places, trips
        self._untaken: deque[Hashable] = deque()
        self.arrivals: deque[tuple[Hashable, float]] = deque(maxlen=_ARRIVALS_REMEMBERED)
        """keys of the newest messages in order, each with the time at which it was here, until they are taken"""
        start(f"receive-{name}", self._run)

    def _run(self) -> None:
        posted: deque[tuple[Hashable, Tensor | None, Work]] = deque()
        expected, is_unknown = iter(self._expected), False
        try:
            while not self._inbox.ended:
                # After None, nothing more is asked of ``expected``, which may wait, until all that was posted has come.
                for message in islice(expected, 0 if is_unknown and posted else self._free() - len(posted)):
                    is_unknown = message is None
                    if message is None:
                        break
                    key, size_bytes, *apart_bytes = message
                    # Memory first, then the receive: a sender that is told to send finds room for the body.
                    body = self._channel.room(*apart_bytes) if self._channel is not None else None
                    buffer = self._copies.room(size_bytes)
                    posted.append((key, body, self._group.receive(buffer, self._peer, self._tag)))
                if posted:
                    key, body, work = posted.popleft()
                    if self._places is not None:
                        self._untaken.append(key)
                    header = work.wait()
                    whole, at_s = self._whole(header, body), time.monotonic()
                    if self._trips is not None:
                        self._trips.note_arrival(header, header.nbytes + (0 if body is None else body.nbytes), at_s)
                    self.arrivals.append((key, at_s))  # first: the training thread may act on it at once
                    self._inbox.put(key, whole)
                    del whole, header
                # Nothing is posted, since all places are taken: wait until the training thread takes a message.
                elif self._untaken and not self._free():
                    self._inbox.pause(lambda: self._free() > 0)
                elif not is_unknown:
                    return
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would hang the stage
            self._inbox.abort(_failure(error, f"the link {self._name} broke while receiving"))

    def _whole(self, header: Tensor, body: Tensor | None) -> Tensor | DeviceMessage:
        if self._channel is None or body is None:
            return header
        self._channel.receive(body)
        return DeviceMessage(header, body)

    def _free(self) -> int:
        """Return the number of receives that may wait for their message."""
        if self._places is None:
            return ACTIVATIONS_COMING
        # Messages are taken in order, so those that are gone from the inbox are the first ones.
        while self._untaken and not self._inbox.has(self._untaken[0]):
            self._untaken.popleft()
        return self._places - len(self._untaken)


class Courier:
    """Runs blocking collectives one after another, off the training thread, and posts their results."""

    def __init__(self, inbox: Inbox, name: str) -> None:
        self._inbox, self._name = inbox, name
        self._queue: queue.SimpleQueue[tuple[Hashable, Callable[[], object]] | None] = queue.SimpleQueue()
        start(name, self._run)

    def submit(self, key: Hashable, work: Callable[[], object]) -> None:
        """Queue ``work``; its result, or an exception that is not a link's, arrives in the inbox under ``key``."""
        self._queue.put((key, work))

    def close(self) -> None:
        """Let the thread end once its queue is empty."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, work = item
            # What is queued behind a broken operation would only wait for peers that are gone.
            if self._inbox.ended:
                return
            result: object
            try:
                result = work()
            except RuntimeError as error:
                self._inbox.abort(_failure(error, f"{self._name} failed on {self._inbox.who}"))
                return
            except BaseException as error:  # noqa: BLE001 - a damaged shard, a SystemExit: for the thread that takes the result
                result = error
            self._inbox.put(key, result)


def _failure(error: Exception, what: str) -> Exception:
    """Return the error that the training thread raises: of a link only if the transport said ``RuntimeError``.

    This rank's own device raises that, too, and then no peer is to be suspected.
    """
    if not isinstance(error, RuntimeError) or kind_of(error) is not None:
        return error
    broken = LinkError(f"{what}: {_first_line(error)}")
    broken.__cause__ = error
    return broken


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
