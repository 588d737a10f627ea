"""Places of what ``after_step`` computes with: buffers that stay in one section, and what sections hold besides.

A section that holds a name which the function writes also holds all that goes into it, so that every holder makes the
same of it. A trained parameter is then tied: its gradient reaches all holders, and each updates it alike. What
forward() updates cannot be in two sections; so no cut comes between such a buffer and what is computed from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from varuna.core.errors import ModelError
from varuna.core.model import TiedParameter
from varuna.partition.after_step import Following
from varuna.partition.cut.buffers import BufferWrite
from varuna.partition.cut.split import SectionGraph, Split
from varuna.partition.graph.captured import Capture
from varuna.partition.graph.flow import Together


def kept_together(
    capture: Capture, updates: Sequence[BufferWrite], following: Following | None
) -> tuple[list[BufferWrite], list[Together]]:
    """Return the updates with all that they must stay beside, and what no cut may come between."""
    # (numbers of updates, names): after_step joins those that it computes one name from
    groups = [({number}, set(update.buffers)) for number, update in enumerate(updates)]
    owners = {name: number for number, update in enumerate(updates) for name in update.buffers}
    linked = set[int]()
    for name in () if following is None else following.sources:
        needed = following.needed_by([name])  # type: ignore[union-attr]
        numbers = {owners[each] for each in needed if each in owners}
        meeting = [group for group in groups if not group[0].isdisjoint(numbers)]
        if meeting:
            rest = [group for group in groups if group not in meeting]
            joined = set().union(*(each[0] for each in meeting)), {name}.union(*(each[1] for each in meeting))
            groups = [*rest, joined]
            linked |= joined[0]
    found, together = list(updates), list[Together]()
    for numbers, names in groups:
        mine = [updates[number] for number in sorted(numbers)]
        statistics = [node for update in mine for node in update.statistics]
        read = [node for update in mine for node in update.read]
        if not numbers.isdisjoint(linked):
            read = list(dict.fromkeys((*read, *_placeholders(capture, names))))
            together.append(Together((*read, *statistics), ()))
        elif read:
            together.append(Together(tuple(read), tuple(statistics)))
        for number in numbers:
            found[number] = replace(updates[number], read=tuple(read))
    return found, together


def held_besides(divided: Split, following: Following) -> dict[int, frozenset[str]]:
    """Names that are in each section's state besides its parameters and what forward() updates.

    Raises:
        ModelError: a buffer that forward() updates would be in two sections.
    """
    used = {each.index: {*each.parameters, *each.buffers, *each.updated} for each in divided.sections}
    owners = {name: each.index for each in divided.sections for name in each.updated}
    held = {index: following.needed_by(names & following.sources.keys()) for index, names in used.items()}
    for name in following.sources:
        if not any(name in names for names in held.values()):
            held[_home(name, following, used, owners)] |= following.needed_by([name])
    for index, names in held.items():
        odd = sorted(name for name in names if owners.get(name, index) != index)
        if odd:
            raise ModelError(
                f"after_step= computes something of section {index} from the buffer {odd[0]}, which forward() updates "
                f"in section {owners[odd[0]]}: {_FEWER}"
            )
    state = {each.index: {*each.parameters, *each.updated} for each in divided.sections}
    return {index: frozenset(names - state[index]) for index, names in held.items()}


_FEWER = "no cut may come between the two. Cut the model elsewhere (cut=[...]), or leave cut= out."


def _home(name: str, following: Following, used: Mapping[int, set[str]], owners: Mapping[str, int]) -> int:
    """The section of a name that forward() does not use."""
    needed = following.needed_by([name])
    updated = [owners[each] for each in sorted(needed) if each in owners]
    users = [index for index, names in used.items() if not names.isdisjoint(needed)]
    return next(iter((*updated, *users)), 0)


def _placeholders(capture: Capture, names: Iterable[str]) -> list[Node]:
    wanted, known = set(names), {**capture.parameters, **capture.buffers}
    return [node for node in capture.graph.find_nodes(op="placeholder") if known.get(node.name) in wanted]


def shared_buffers(sections: Sequence[SectionGraph]) -> dict[str, list[int]]:
    """Buffers that are in the state of several sections, of which the first owns them."""
    holders: dict[str, list[int]] = {}
    for section in sections:
        for name in section.updated:
            holders.setdefault(name, []).append(section.index)
    return {name: found for name, found in holders.items() if len(found) > 1}


def owned_elsewhere(sections: Sequence[SectionGraph], tied: Iterable[TiedParameter], section: int) -> frozenset[str]:
    """Parameters and buffers of a section that another one owns."""
    parameters = {parameter.name for parameter in tied if parameter.owner != section}
    return frozenset(parameters | {name for name, first in shared_buffers(sections).items() if first[0] != section})
