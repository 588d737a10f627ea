"""State of sections from live holders to ranks that need it, when a generation begins."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.frozen import LeftOut
from varuna.checkpoint.io.section_state import SectionState, from_bytes, to_bytes
from varuna.core.messages import Transfer
from varuna.core.sums import SumAt
from varuna.engine.base.transport import Group
from varuna.engine.stage.load_state import COPIED_SUMS, STATISTICS, SUMS, first_of, is_lent_along

_TAG = 100_000


class Received(NamedTuple):
    """What came from other ranks."""

    states: dict[int, SectionState]
    """by section"""
    sums: dict[tuple[int, SumAt], SectionState]
    """by section and where they were"""


def exchange(
    group: Group,
    transfers: Sequence[Transfer],
    rank: int,
    held: Mapping[int, SectionState],
    left_out: LeftOut | None = None,
    dtype: torch.dtype = torch.float32,
) -> Received:
    """Take part in all transfers of this rank at once; returns what it received.

    Each is a length and then the section in the checkpoint's format, whole or without optimizer state (which others
    hold, or which follows: ``engine.copies.following``), or its sums of gradients. All lengths are posted before any is
    waited for, and so are all sections, so no order of transfers can deadlock. A rank asks for all sections before it
    sends any, as in ``Group.exchange``: else two that swap sections may use their line in one direction after the
    other. Between two ranks, messages are told apart by their section and kind: each rank knows its own transfers only.

    Args:
        group: every member of the generation.
        transfers: all copies, the same list on every rank.
        rank: this one.
        held: by section, state that this rank has; storages are read in place.
        left_out: frozen parameters that receivers read from disk.
        dtype: of computation.

    Raises:
        RuntimeError: a peer is gone (from gloo).
    """
    packed: dict[tuple[int, bool, bool, bool, bool], Tensor] = {}
    sends: list[tuple[Transfer, Tensor]] = []
    for transfer in transfers:
        if transfer.source_rank == rank:
            key = transfer.section, transfer.lent, transfer.follows, transfer.sums, transfer.copied
            if key not in packed:
                state = _part(held[transfer.section], transfer, dtype)
                state = state if left_out is None or transfer.sums else left_out.of(state)
                packed[key] = torch.frombuffer(bytearray(to_bytes(state)), dtype=torch.uint8)
            sends.append((transfer, packed[key]))
    receives = [each for each in transfers if each.target_rank == rank and each.source_rank != rank]
    sizes = [(each, torch.tensor([body.numel()], dtype=torch.int64)) for each, body in sends]
    lengths = _pass(group, sizes, [(each, torch.zeros(1, dtype=torch.int64)) for each in receives], more=0)
    empty = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    bodies = _pass(group, sends, list(zip(receives, empty, strict=True)), more=1)
    found = [(each, from_bytes(body.numpy().tobytes())) for each, body in zip(receives, bodies, strict=True)]
    return Received(
        {each.section: state for each, state in found if not each.sums},
        {(each.section, SumAt(each.source_rank, each.copied)): state for each, state in found if each.sums},
    )


def _part(state: SectionState, transfer: Transfer, dtype: torch.dtype) -> SectionState:
    """What of a section's state is sent."""
    if transfer.copied:
        return sums_copied(state)

    def goes(name: str) -> bool:
        if name in (SUMS, STATISTICS, COPIED_SUMS):
            return transfer.sums and name != COPIED_SUMS
        return not transfer.sums and (not transfer.lent or is_lent_along(name))

    part = state.only(goes)
    return first_of(part, dtype) if transfer.follows else part


def sums_copied(state: SectionState) -> SectionState:
    """The copy of another rank's sums that is with a state, as if they were this one's; nothing, if there is none."""
    if COPIED_SUMS not in state.tensors:
        return SectionState(state.section, {})
    return SectionState(state.section, {SUMS: state.tensors[COPIED_SUMS]}, {SUMS: state.scalars[COPIED_SUMS]})


def _tag(transfer: Transfer) -> int:
    """Of the length; that of the section itself is one more."""
    return _TAG + 6 * transfer.section + 2 * (transfer.sums + transfer.copied)


def _pass(
    group: Group,
    sends: Sequence[tuple[Transfer, Tensor]],
    receives: Sequence[tuple[Transfer, Tensor]],
    *,
    more: int,
) -> list[Tensor]:
    """Ask for what comes, then send what goes, then wait for all of it; returns what came."""
    coming = [group.receive(buffer, each.source_rank, _tag(each) + more) for each, buffer in receives]
    going = [group.send(body, each.target_rank, _tag(each) + more) for each, body in sends]
    came = [work.wait() for work in coming]
    for work in going:
        work.wait()
    return came
