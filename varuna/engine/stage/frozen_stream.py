"""Frozen parameters that rest in host memory: the device has those of the section at work, and of the one after it.

Two places take turns. While a section computes, the parameters of the one that followed it last time are copied into
the other place: F, R and B of a stage visit its sections in few orders.

What autograd saves of a place, it saves by name. In B the section's parameters are there once more, in whichever place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from varuna.core.plan import Plan
from varuna.engine.device.host_copies import DONE, HostCopies, Ready, laid_out, size_together
from varuna.partition.cut.split import SectionGraph
from varuna.partition.model import PartitionedModel
from varuna.schedule.buffers import FROZEN_PLACES

Pass = Literal["F", "R", "B"]
_NOBODY = -1


class FrozenStream:
    """The frozen parameters of a stage, section by section."""

    def __init__(self, sections: Mapping[int, Mapping[str, Tensor]], copies: HostCopies) -> None:
        """Allocate the places.

        Args:
            sections: parameters by section and name, in host memory, where copies can start.
            copies: from there to the device.
        """
        self._sections, self._copies = sections, copies
        size_bytes = max(size_together(list(held.values())) for held in sections.values())
        self._places = [_Place(copies.place(size_bytes)) for _ in range(min(FROZEN_PLACES, len(sections)))]
        self._at = self._places[0]
        self._turn: _Turn = ("F", _NOBODY, _NOBODY)
        self._followed: dict[_Turn, int] = {}

    def __contains__(self, section: int) -> bool:
        """Return whether the section has such parameters."""
        return section in self._sections

    def at_work(self, section: int, way: Pass) -> Mapping[str, Tensor]:
        """Return a section's parameters on the device; they stay until those of another section are asked for."""
        if self._at.section != section:
            self._turn_to(section, way)
        return self._at.held

    def saving(self, section: int) -> saved_tensors_hooks:
        """Let autograd save the parameters of the section at work by name in this block."""
        address = self._at.address

        def pack(value: Tensor) -> object:
            if value.layout is not torch.strided or value.untyped_storage().data_ptr() != address:
                return value
            # A view by sizes and strides would lose the pending operation.
            if value.is_conj() or value.is_neg():
                return value.clone()
            return _Saved(section, value.dtype, value.size(), value.stride(), int(value.storage_offset()))

        return saved_tensors_hooks(pack, self._unpacked)

    def _unpacked(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, _Saved)
        self.at_work(packed.section, "B")
        return self._at.memory.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _turn_to(self, section: int, way: Pass) -> None:
        # Usually it is there, since it followed the last time as well.
        there = next((place for place in self._places if place.section == section), None)
        if there is None:
            there = self._bring(section)
        self._followed[self._turn] = section
        self._turn = way, self._at.section, section
        self._at = there
        self._copies.compute_after(there.arrived)
        coming = self._followed.get(self._turn, section)
        if all(place.section != coming for place in self._places):
            self._bring(coming)

    def _bring(self, section: int) -> "_Place":
        """Begin to copy a section's parameters over those that are not at work, once what uses them is through."""
        place = next((each for each in self._places if each is not self._at), self._at)
        values = list(self._sections[section].values())
        views = laid_out(values, place.memory)
        place.section, place.held = section, dict(zip(self._sections[section], views, strict=True))
        # After what is queued now: it may still read the parameters that were here.
        place.arrived = self._copies.overwrite(list(zip(views, values, strict=True)), self._copies.point())
        return place


_Turn = tuple[Pass, int, int]
"""The turn of a section: the pass, the section at work before it, and itself."""


class _Place:
    """Device memory for the parameters of one section."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.address = memory, memory.untyped_storage().data_ptr()
        self.section = _NOBODY
        self.held: Mapping[str, Tensor] = {}
        self.arrived: Ready = DONE


class _Saved(NamedTuple):
    """A view of a section's parameters."""

    section: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def streamed_by(plan: Plan, model: PartitionedModel, sections: range) -> frozenset[str]:
    """Return names of the parameters that rest in host memory while a stage's other sections are at work.

    None where the places for them would take as much of the device.
    """
    sizes = [model.facts.sections[section].streamable_bytes for section in sections]
    pays = plan.streams_frozen and FROZEN_PLACES * max(sizes) < sum(sizes)
    return model.streamable if pays else frozenset()


def stream_of(
    graphs: Iterable[SectionGraph], parameters: Mapping[str, nn.Parameter], streamed: frozenset[str], copies: HostCopies
) -> FrozenStream | None:
    """Bring parameters to rest, and return how they come to work; None if none of these sections has any.

    Args:
        graphs: of a stage's sections.
        parameters: of the stage; those that are streamed are in host memory.
        streamed: names.
        copies: from host memory to the device.
    """
    sections: dict[int, dict[str, Tensor]] = {}
    for graph in graphs:
        names: Sequence[str] = [name for name in dict.fromkeys(graph.parameters) if name in streamed]
        homes = copies.at_rest([parameters[name].detach() for name in names])
        for name, home in zip(names, homes, strict=True):
            parameters[name].data = home
        if names:
            sections[graph.index] = {name: parameters[name].detach() for name in names}
    return FrozenStream(sections, copies) if sections else None
