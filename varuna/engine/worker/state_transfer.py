"""State of sections from live holders to ranks that need it, when a generation begins."""

import queue
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.frozen import FrozenParameters
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.messages import Transfer
from varuna.core.sums import SumLocation
from varuna.engine.base.transport import Group, Work
from varuna.engine.copies.layout import Body, SectionLayout, as_bytes, from_bytes
from varuna.engine.device.host_copies import CPU_COPIES, HostCopies
from varuna.engine.links.in_parts import Outgoing, part_bytes_for, spans_of
from varuna.engine.stage.load_state import COPIED_SUMS, STATISTICS, SUMS, first_of, is_needed_to_compute
from varuna.process.threads import start

_TAG = 100_000
_MESSAGES = 3  # of a transfer: what it is, its header, its body


class Received(NamedTuple):
    """States and sums that came from other ranks."""

    states: dict[int, SectionState]
    """by section"""
    sums: dict[tuple[int, SumLocation], SectionState]
    """by section and where they were"""


class _Coming(NamedTuple):
    """A section that has been asked for, in all its parts, and the memory that it arrives in."""

    transfer: Transfer
    layout: SectionLayout
    memory: Tensor
    works: Sequence[Work]


def exchange_states(
    group: Group,
    transfers: Sequence[Transfer],
    rank: int,
    held: Mapping[int, SectionState],
    left_out: FrozenParameters | None = None,
    dtype: torch.dtype = torch.float32,
    copies: HostCopies = CPU_COPIES,
) -> Received:
    """Take part in all transfers of this rank at once; returns what it received, in host memory.

    Each is a header and then the bytes of the section in parts, whole or without optimizer state (which others hold, or
    which follows: ``engine.copies.following``), or its sums of gradients. A rank asks for all of it before it sends
    any, so no order of transfers can deadlock, and two that swap sections use their line in both directions at once.
    Between two ranks, messages are told apart by their section and kind: each rank knows its own transfers only.

    Beside what comes, this takes ``STAGING_BYTES`` of host memory at most, and what is cast or copied of one section
    for each target.

    Args:
        group: every member of the generation.
        transfers: all copies, the same list on every rank.
        rank: this one.
        held: by section, state that this rank has; storages are read in place until all is sent.
        left_out: frozen parameters that receivers read from disk.
        dtype: of computation.
        copies: of state, from the device that it is on.

    Raises:
        RuntimeError: a peer is gone.
        CheckpointError: a tensor's dtype has no name.
    """

    def part_of(transfer: Transfer) -> SectionState:
        state = _part(held[transfer.section], transfer, dtype)
        return state if left_out is None or transfer.sums else left_out.of(state)

    sends = [(each, SectionLayout.of(part_of(each))) for each in transfers if each.source_rank == rank]
    receives = [each for each in transfers if each.target_rank == rank and each.source_rank != rank]
    targets = dict.fromkeys(each.target_rank for each, _ in sends)
    part_bytes = part_bytes_for(len(targets))
    coming = _ask(group, sends, receives, part_bytes)
    sent = queue.SimpleQueue[Exception | None]()

    def send(target: int) -> None:
        try:
            largest = max(layout.size_bytes for each, layout in sends if each.target_rank == target)
            going = Outgoing(group, [target], min(part_bytes, largest), copies.room)
            for each, layout in sends:
                if each.target_rank == target:
                    body, after = Body.of_states([layout], {each.section: part_of(each)}), copies.point()
                    for first, end in spans_of(body.size_bytes, part_bytes):
                        fill = partial(body.read, first, copies=copies, after=after)
                        going.send(_tag(each, 2), end - first, fill)
            going.finish()
        except Exception as error:  # noqa: BLE001  the thread that waits for this one must hear why it ended
            sent.put(error)
        else:
            sent.put(None)

    for target in targets:  # each at its own speed
        start("sections-sender", partial(send, target))
    found = [(each.transfer, _await(each)) for each in coming]
    for _ in targets:
        if (error := sent.get()) is not None:
            raise error
    return Received(
        {each.section: state for each, state in found if not each.sums},
        {(each.section, SumLocation(each.source_rank, each.copied)): state for each, state in found if each.sums},
    )


def _ask(
    group: Group, sends: Sequence[tuple[Transfer, SectionLayout]], receives: Sequence[Transfer], part_bytes: int
) -> list[_Coming]:
    """Tell what is sent, and ask for all parts of what comes."""
    headers = [(each, torch.frombuffer(bytearray(as_bytes([layout])), dtype=torch.uint8)) for each, layout in sends]
    # Two numbers first: a receive needs the exact size, and parts depend on how many targets share the sender's memory.
    sizes = [(each, torch.tensor([header.numel(), part_bytes])) for each, header in headers]
    told = _pass(group, sizes, [(each, torch.zeros(2, dtype=torch.int64)) for each in receives], message=0)
    rooms = [torch.empty(int(size[0]), dtype=torch.uint8) for size in told]
    found = _pass(group, headers, list(zip(receives, rooms, strict=True)), message=1)
    coming = []
    for each, size, header in zip(receives, told, found, strict=True):
        [layout] = from_bytes(header.numpy().tobytes())
        memory = torch.empty(layout.size_bytes, dtype=torch.uint8)
        works = [
            group.receive(memory[first:end], each.source_rank, _tag(each, 2))
            for first, end in spans_of(layout.size_bytes, int(size[1]))
        ]
        coming.append(_Coming(each, layout, memory, works))
    return coming


def _await(coming: _Coming) -> SectionState:
    for work in coming.works:
        work.wait()
    return coming.layout.state_in(coming.memory)


def _part(state: SectionState, transfer: Transfer, dtype: torch.dtype) -> SectionState:
    """Return the part of a section's state that is sent."""
    if transfer.copied:
        return sums_copied(state)

    def goes(name: str) -> bool:
        if name in (SUMS, STATISTICS, COPIED_SUMS):
            return transfer.sums and name != COPIED_SUMS
        return not transfer.sums and (not transfer.lent or is_needed_to_compute(name))

    part = state.only(goes)
    return first_of(part, dtype) if transfer.follows else part


def sums_copied(state: SectionState) -> SectionState:
    """Return the copy of another rank's sums that is with a state, as if they were its own; nothing, if none is."""
    if COPIED_SUMS not in state.tensors:
        return SectionState(state.section, {})
    return SectionState(state.section, {SUMS: state.tensors[COPIED_SUMS]}, {SUMS: state.scalars[COPIED_SUMS]})


def _tag(transfer: Transfer, message: int) -> int:
    # Of a section, 0 is its state, 1 its sums, and 2 copied sums, which are sums, too; each in three messages.
    return _TAG + _MESSAGES * (3 * transfer.section + transfer.sums + transfer.copied) + message


def _pass(
    group: Group,
    sends: Sequence[tuple[Transfer, Tensor]],
    receives: Sequence[tuple[Transfer, Tensor]],
    *,
    message: int,
) -> list[Tensor]:
    """Ask for what comes, then send what goes, then wait for all of it; returns what came."""
    coming = [group.receive(buffer, each.source_rank, _tag(each, message)) for each, buffer in receives]
    going = [group.send(body, each.target_rank, _tag(each, message)) for each, body in sends]
    came = [work.wait() for work in coming]
    for work in going:
        work.wait()
    return came
