"""Before step 0: does any rank refuse the job, and do all holders of a section begin with the same parameters?"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import ModelError, VarunaError
from varuna.core.plan import Plan
from varuna.engine.base.transport import Group
from varuna.partition.model import PartitionedModel

_ROUNDING = 1e-3
"""Largest difference of first values that rounding explains, as a part of the largest value of their tensor."""
_TAG = 80_100


class _Holding(NamedTuple):
    """Something that several ranks hold, as one of its holders has it."""

    what: str
    section: int
    rank: int
    keys: tuple[str, ...]
    """of its tensors in the section's state"""


class _Found(NamedTuple):
    """The holdings of one thing, with the checksum of each."""

    holdings: tuple[_Holding, ...]
    values: tuple[int, ...]


def check_agreement(
    group: Group, model: PartitionedModel, plan: Plan, rank: int, states: Mapping[int, SectionState], kind: int
) -> bool:
    """Compare first values of sections over replicas, and of tied parameters over all their copies; blocks.

    Processors of several kinds round what they draw each in its own way. Then all holders take the values of the first.
    Every member of ``group`` takes part, spares too, so that none passes before all have their state.

    Args:
        group: every member of the generation.
        model: says what is held.
        plan: says by whom.
        rank: this one; spares hold nothing.
        states: of this rank's sections; tensors of them may be replaced.
        kind: of this rank's processor.

    Returns:
        whether values were rounded in several ways.

    Raises:
        ModelError: two holders differ by more; every rank raises it.
        RuntimeError: a peer is gone.
    """
    holdings = list(_holdings(model, plan))
    sums, kinds = torch.zeros(len(holdings), dtype=torch.int64), torch.zeros(group.size, dtype=torch.int64)
    kinds[rank] = kind
    for slot, holding in enumerate(holdings):
        if rank == holding.rank:
            state = states[holding.section]
            sums[slot] = checksum(state.tensors[key] for key in holding.keys)
    # One writer for each slot: the sum is the table, on every rank.
    table = torch.cat((sums, kinds))
    group.all_reduce(table)
    values, kinds = table[: len(holdings)].tolist(), table[len(holdings) :]
    odd = []
    for _, pairs in groupby(zip(holdings, values, strict=True), key=lambda pair: pair[0].what):
        found = _Found(*map(tuple, zip(*pairs, strict=True)))
        if len(set(found.values)) > 1:
            odd.append(found)
    # On processors of one kind nothing rounds differently, so a difference is a different model.
    wrong = _adopt(group, rank, states, odd) if odd and bool((kinds != kinds[0]).any()) else odd
    if wrong:
        with contextlib.suppress(RuntimeError):  # none leaves before all have seen the difference
            group.all_reduce(torch.zeros(1))
        raise ModelError(_difference(wrong[0]))
    return bool(odd)


def _adopt(group: Group, rank: int, states: Mapping[int, SectionState], odd: Sequence[_Found]) -> list[_Found]:
    """Give the values of the first holder to all others; return where these differ by more than rounding."""
    more = torch.zeros(len(odd))
    for number, (first, *others) in enumerate(each.holdings for each in odd):
        for other in others:
            for theirs, mine in zip(first.keys, other.keys, strict=True):
                sent = states[first.section].tensors[theirs] if rank == first.rank else None
                if rank == other.rank:
                    tensors = states[other.section].tensors
                    taken = _receive(group, first.rank, tensors[mine]) if sent is None else sent
                    more[number] += not _is_rounding(tensors[mine], taken)
                    tensors[mine] = taken
                elif sent is not None:
                    group.send(_bytes_of(sent), other.rank, _TAG).wait()
    group.all_reduce(more)
    return [each for each, count in zip(odd, more.tolist(), strict=True) if count]


def _receive(group: Group, source: int, like: Tensor) -> Tensor:
    room = torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)
    group.receive(_bytes_of(room), source, _TAG).wait()
    return room.to(like.device)


def _bytes_of(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _is_rounding(mine: Tensor, theirs: Tensor) -> bool:
    if not (mine.is_floating_point() or mine.is_complex()) or not mine.numel():
        return mine.equal(theirs)
    wide = torch.complex128 if mine.is_complex() else torch.float64
    one, other = mine.detach().to("cpu", wide), theirs.detach().to("cpu", wide)
    return torch.allclose(one, other, rtol=0.0, atol=_ROUNDING * float(other.abs().max()), equal_nan=True)


def share_refusal(group: Group, rank: int, members: int, refusal: VarunaError | None) -> None:
    """Tell all members if one of them refuses the job, and why; blocks.

    One rank alone looks at the whole model: without this the others would know only that it is gone.

    Raises:
        VarunaError: this rank's own refusal, or the text of the first rank that has one.
        RuntimeError: a peer is gone.
    """
    text = b"" if refusal is None else str(refusal).encode()
    lengths = torch.zeros(members, dtype=torch.int64)
    lengths[rank] = len(text)
    group.all_reduce(lengths)
    speakers = [each for each, length in enumerate(lengths.tolist()) if length]
    if not speakers:
        return
    words = torch.zeros(int(lengths[speakers[0]]), dtype=torch.int64)
    if rank == speakers[0]:
        words += torch.tensor(list(text))
    group.all_reduce(words)
    with contextlib.suppress(RuntimeError):  # none leaves before all have heard it
        group.all_reduce(torch.zeros(1))
    raise refusal or ModelError(f"rank {speakers[0]} refused the job: {bytes(words.tolist()).decode()}")


def checksum(tensors: Iterable[Tensor]) -> int:
    """Hash shapes and bits, to a signed 64-bit number."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(_bytes_of(tensor).numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _holdings(model: PartitionedModel, plan: Plan) -> Iterator[_Holding]:
    """Yield all holdings, those of the same thing next to each other."""
    for section in model.sections:
        label = f"section {section.index} ({section.label})"
        keys = tuple(f"parameters/{name}" for name in dict.fromkeys(section.parameters))
        keys += tuple(f"buffers/{name}" for name in section.updated)
        for replica in range(plan.replicas):
            yield _Holding(label, section.index, plan.home_of(replica, section.index), keys)
    for tied in model.facts.tied:
        for index in tied.sections:
            for replica in range(plan.replicas):
                what, home = f"the tied parameter {tied.name}", plan.home_of(replica, index)
                yield _Holding(what, index, home, (f"parameters/{tied.name}",))


def _difference(found: _Found) -> str:
    ranks: dict[int, set[int]] = {}
    for holding, value in zip(*found, strict=True):
        ranks.setdefault(value, set()).add(holding.rank)
    groups = " and ".join(f"rank{'s' * (len(each) > 1)} {', '.join(map(str, sorted(each)))}" for each in ranks.values())
    return (
        f"{found.holdings[0].what} starts with different parameters on {groups}. model= must build the same module on "
        "every worker: draw from torch's generator only, seed everything else yourself, or pass "
        'init="per_parameter". With weights=, use the same files on every machine.'
    )
