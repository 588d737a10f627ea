"""Before step 0: does any rank refuse the job, and do all holders of a section begin with the same parameters?"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import ModelError, VarunaError
from varuna.core.plan import Plan
from varuna.engine.base.transport import Group
from varuna.partition.model import PartitionedModel


class _Holding(NamedTuple):
    """Something that several ranks hold, as one of its holders has it."""

    what: str
    section: int
    replica: int
    keys: tuple[str, ...]
    """of its tensors in the section's state"""


def check_agreement(
    group: Group, model: PartitionedModel, plan: Plan, rank: int, states: Mapping[int, SectionState]
) -> None:
    """Compare checksums of sections over replicas, and of tied parameters over all their copies; blocks.

    Every member of ``group`` takes part, spares too, so that nobody passes before all have their state.

    Args:
        group: every member of the generation.
        model: says what is held.
        plan: says by whom.
        rank: this one; spares hold nothing.
        states: of this rank's sections.

    Raises:
        ModelError: two holders differ; every rank raises it.
        RuntimeError: a peer is gone.
    """
    holdings = list(_holdings(model, plan))
    sums = torch.zeros(len(holdings), dtype=torch.int64)
    for slot, holding in enumerate(holdings):
        if rank == plan.home_of(holding.replica, holding.section):
            state = states[holding.section]
            sums[slot] = checksum(state.tensors[key] for key in holding.keys)
    group.all_reduce(sums)
    for what, found in groupby(zip(holdings, sums.tolist(), strict=True), key=lambda pair: pair[0].what):
        ranks: dict[int, list[int]] = {}
        for holding, value in found:
            holder = plan.home_of(holding.replica, holding.section)
            ranks.setdefault(value, []).append(holder)
        if len(ranks) > 1:
            with contextlib.suppress(RuntimeError):  # nobody leaves before all have seen the difference
                group.all_reduce(torch.zeros(1))
            raise ModelError(_difference(what, [sorted(set(holders)) for holders in ranks.values()]))


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
    with contextlib.suppress(RuntimeError):  # nobody leaves before all have heard it
        group.all_reduce(torch.zeros(1))
    raise refusal or ModelError(f"rank {speakers[0]} refused the job: {bytes(words.tolist()).decode()}")


def checksum(tensors: Iterable[Tensor]) -> int:
    """A hash of shapes and bits, as a signed 64-bit number."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _holdings(model: PartitionedModel, plan: Plan) -> Iterator[_Holding]:
    """All holdings, those of the same thing next to each other."""
    for section in model.sections:
        label = f"section {section.index} ({section.label})"
        keys = tuple(f"parameters/{name}" for name in dict.fromkeys(section.parameters))
        keys += tuple(f"buffers/{name}" for name in section.updated)
        for replica in range(plan.replicas):
            yield _Holding(label, section.index, replica, keys)
    for tied in model.facts.tied:
        for index in tied.sections:
            for replica in range(plan.replicas):
                yield _Holding(f"the tied parameter {tied.name}", index, replica, (f"parameters/{tied.name}",))


def _difference(what: str, holders: list[list[int]]) -> str:
    groups = " and ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in holders)
    return (
        f"{what} starts with different parameters on {groups}. model= must build the same module on every worker: draw "
        'from torch\'s generator only, seed everything else yourself, or pass init="per_parameter". With weights=, '
        "use the same files on every machine."
    )
