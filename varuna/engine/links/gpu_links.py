"""Memory that goes from GPU to GPU: links and sums of gradients whose workers all have GPUs of their own.

A call of NCCL blocks its stream, and holds a part of the device, until its peers have made theirs. So a rank calls
only after its peers have said over TCP that they are there, with memory allocated: a device never waits for a late
peer, the host knows what has arrived, and a lost peer shows on its connections as always. This module sees NCCL as a
``Communicator``; all that is CUDA's own is in ``nccl``.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.engine.base.transport import FORMING_BOUND_S, OPERATION_BOUND_S, Group
from varuna.engine.device.streams import Stream, Streams
from varuna.process.threads import start

_POLL_S, _LONGEST_POLL_S = 2e-5, 3e-4
_WARM_BYTES = 8


class Communicator(Protocol):
    """GPUs that reach each other's memory. Calls return at once; the stream is blocked until all peers have called."""

    def send(self, buffer: Tensor, peer: int, stream: Stream) -> None:
        """Queue a transfer of bytes to member ``peer``."""

    def receive(self, buffer: Tensor, peer: int, stream: Stream) -> None:
        """Queue a transfer of bytes from member ``peer``."""

    def all_reduce(self, values: Tensor, stream: Stream) -> None:
        """Queue a sum over all members of flat fp32 ``values``, in place; all get the same bits."""

    def ready(self) -> bool:
        """Return whether it is connected, and what was asked for last is on its stream.

        Raises:
            RuntimeError: a peer is gone, or it was aborted.
        """

    def abort(self) -> None:
        """Free every stream that it blocks, and drop it; may block this thread, and be called by any."""


class GpuTransport(Protocol):
    """Makes communicators of this worker's GPU."""

    def bind(self, interface_host: str) -> None:
        """Use the private interface with this address."""

    def new_identity(self) -> bytes:
        """Make the identity of a new communicator, for all of its members."""

    def connect(self, identity: bytes, rank: int, size: int) -> Communicator:
        """Begin to connect to the other members."""


class CommGroup(NamedTuple):
    """The ranks that share a communicator."""

    name: str
    members: tuple[int, ...]
    """ranks: of a link the sender and the receiver, of sums all replicas of a stage"""
    sums: bool


def comm_groups(plan: Plan, gpus: Sequence[int], *, sums: bool) -> list[CommGroup]:
    """List all communicators of a generation, in the order in which every rank makes those that it is in.

    Links take turns by the parity of their stages, so that pairs of a turn have no rank in common and connect at once.

    Args:
        plan: of the generation.
        gpus: which GPU each rank of the grid has, 0 if it is not known; one that several have takes part in nothing.
        sums: whether sums of gradients may go this way.
    """
    times = Counter(gpus)
    own = [gpu != 0 and times[gpu] == 1 for gpu in gpus]
    found: list[CommGroup] = []
    for parity in (0, 1):
        for replica in range(plan.replicas):
            for stage in range(parity, plan.pipeline_of(replica).stages - 1, 2):
                low, high = plan.rank_of(replica, stage), plan.rank_of(replica, stage + 1)
                if own[low] and own[high]:
                    # One for each direction: a call blocks its stream until the other end has called.
                    found += [CommGroup(f"{a}>{b}", (a, b), sums=False) for a, b in ((low, high), (high, low))]
    # Where pipelines are divided differently, a rank sums with several sets of others: that goes through hosts.
    for stage in range(plan.stages if sums and plan.replicas > 1 and plan.is_uniform else 0):
        members = tuple(plan.rank_of(replica, stage) for replica in range(plan.replicas))
        if all(own[rank] for rank in members):
            found.append(CommGroup(f"stage{stage}", members, sums=True))
    return found


class GpuChannel:
    """A direction of a link, or the sums of a stage: a communicator with a stream of its own. Calls block."""

    def __init__(self, communicator: Communicator, peer: int, streams: Streams, ended: Callable[[], bool]) -> None:
        """Begin.

        Args:
            communicator: of these members alone.
            peer: the other member of a link.
            streams: of the device.
            ended: whether the generation is over, which ends every wait.
        """
        self._communicator, self._peer, self._streams, self._ended = communicator, peer, streams, ended
        self._stream = streams.stream()

    def room(self, size_bytes: int) -> Tensor:
        """Allocate device memory for what arrives, as bytes."""
        return self._streams.allocate(self._stream, size_bytes)

    def connected(self) -> None:
        """Wait for the other members.

        Raises:
            RuntimeError: one did not come within the bound, or the generation ended.
        """
        self._until(self._communicator.ready, FORMING_BOUND_S, "a member to connect by NCCL")

    def send(self, body: Tensor, bound_s: float = OPERATION_BOUND_S) -> None:
        """Send bytes that are ready; the peer has said that it has room.

        Raises:
            RuntimeError: the peer is gone, the generation ended, or the bound has passed.
        """
        self._communicator.send(body, self._peer, self._stream)
        self._pass(body, bound_s)

    def receive(self, body: Tensor, bound_s: float = OPERATION_BOUND_S) -> None:
        """Receive into ``room``; the peer has said that it sends.

        Raises:
            RuntimeError: as ``send``.
        """
        self._communicator.receive(body, self._peer, self._stream)
        self._pass(body, bound_s)

    def all_reduce(self, values: Tensor, bound_s: float = OPERATION_BOUND_S) -> None:
        """Sum flat fp32 values that are ready, in place; all members have said that theirs are.

        Raises:
            RuntimeError: as ``send``.
        """
        self._communicator.all_reduce(values, self._stream)
        self._pass(values, bound_s)

    def _pass(self, value: Tensor, bound_s: float) -> None:
        """Wait until the device has finished what was asked for last."""
        self._streams.record_stream(value, self._stream)  # an abort frees this thread before it frees the device
        self._until(self._communicator.ready, bound_s, "NCCL to launch")
        event = self._streams.record_event(self._stream)
        self._until(lambda: self._communicator.ready() and event.passed(), bound_s, "a transfer by NCCL")

    def _until(self, passed: Callable[[], bool], bound_s: float, what: str) -> None:
        deadline_s, pause_s = time.monotonic() + bound_s, _POLL_S
        while not passed():  # CUDA waits for an event without a bound, and sees no peer's death
            if self._ended():
                raise RuntimeError("the generation ended")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {bound_s:.0f} s for {what}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


class GpuLinks:
    """A rank's channels in one generation; none until they are connected."""

    def __init__(self) -> None:
        self.sends: dict[int, GpuChannel] = {}
        """by the receiver's rank"""
        self.receives: dict[int, GpuChannel] = {}
        """by the sender's rank"""
        self.sums: GpuChannel | None = None
        self._held: list[Communicator] = []
        self._is_over = False
        self._lock = threading.Lock()

    def abort_with_others(self, communicator: Communicator) -> None:
        """See that ``communicator`` is aborted with all others.

        Raises:
            RuntimeError: that has happened.
        """
        with self._lock:
            if not self._is_over:
                self._held.append(communicator)
                return
        communicator.abort()
        raise RuntimeError("the generation was abandoned while it formed")

    def abandon(self) -> None:
        """Run ``abort``, which may block, on a thread of its own; without one if there is nothing to abort."""
        with self._lock:
            self._is_over, is_empty = True, not self._held
        if not is_empty:
            start("abort", self.abort)

    def abort(self) -> None:
        """Abort all communicators, those that a thread is still making too."""
        with self._lock:
            self._is_over, held = True, list(self._held)
            self._held.clear()
        for communicator in held:
            communicator.abort()


def connect(
    direct: GpuLinks,
    gpu_transport: GpuTransport,
    streams: Streams,
    *,
    plan: Plan,
    rank: int,
    group: Group,
    store: Any,
    sums: bool,
    ended: Callable[[], bool],
) -> None:
    """Make and warm up every channel of this rank; blocks until the peers do the same.

    A first transfer by NCCL sets up its connections, which takes far longer than any other.

    Args:
        direct: gets the channels.
        gpu_transport: of this worker's GPU.
        streams: of the device.
        plan: of the generation.
        rank: in the grid.
        group: all ranks of the grid.
        store: with a prefix of this generation's.
        sums: whether sums of gradients may go this way.
        ended: whether the generation is over.

    Raises:
        RuntimeError: a member did not come within the bound, or the generation ended.
    """
    table = torch.zeros(plan.workers, dtype=torch.int64)
    if device := streams.memory():
        digest = hashlib.blake2b(device.name.encode(), digest_size=8).digest()
        table[rank] = int.from_bytes(digest, "little", signed=True)
    # One writer for each entry: the sum says which GPU each rank has.
    group.all_reduce(table)
    for comm_group in comm_groups(plan, table.tolist(), sums=sums):
        if rank in comm_group.members:
            _join(comm_group, comm_group.members.index(rank), direct, gpu_transport, streams, store, ended)


def _join(
    comm_group: CommGroup,
    place: int,
    direct: GpuLinks,
    gpu_transport: GpuTransport,
    streams: Streams,
    store: Any,
    ended: Callable[[], bool],
) -> None:
    if ended():
        raise RuntimeError("the generation ended while it formed")
    if place == 0:
        identity = gpu_transport.new_identity()
        store.set(comm_group.name, identity.hex())
    else:
        store.wait([comm_group.name], timedelta(seconds=FORMING_BOUND_S))
        identity = bytes.fromhex(store.get(comm_group.name).decode())
    communicator = gpu_transport.connect(identity, place, len(comm_group.members))
    direct.abort_with_others(communicator)
    channel = GpuChannel(communicator, 1 - place, streams, ended)
    channel.connected()
    warm = channel.room(_WARM_BYTES)
    if comm_group.sums:
        channel.all_reduce(warm.view(torch.float32), FORMING_BOUND_S)
        direct.sums = channel
    elif place == 0:
        channel.send(warm, FORMING_BOUND_S)
        direct.sends[comm_group.members[1]] = channel
    else:
        channel.receive(warm, FORMING_BOUND_S)
        direct.receives[comm_group.members[0]] = channel
