"""What buffers that forward() writes are updated from, and the update itself (batch normalisation).

A section returns the statistics of each micro-batch next to its results. Those of the micro-batch's first run in
a step count (F), never those of a recompute (R). When a section is through with a step, its replicas tell each other
theirs; the commit then applies all of them, in the order of micro-batches. So what the buffers become depends on
neither P nor D, and an undone step leaves no trace.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.links.message import Layout
from varuna.partition.cut.split import SectionGraph


class Statistics:
    """Statistics of one step, for the sections of one stage."""

    def __init__(self, sections: Sequence[SectionGraph], plan: Plan, copies: HostCopies) -> None:
        self._sections = {section.index: section for section in sections if section.updates}
        self._plan = plan
        self._copies = copies
        self._noted: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._complete: dict[int, list[dict[str, Tensor]]] = {}

    def clear(self) -> None:
        """Forget all: a step begins, perhaps again."""
        self._noted.clear()
        self._complete.clear()

    def note(self, section: int, micro_batch: int, found: Sequence[Tensor]) -> None:
        """Keep what the first run of a micro-batch found; whatever runs it again is ignored."""
        self._noted.setdefault((section, micro_batch), tuple(value.detach() for value in found))

    def has(self, section: int) -> bool:
        """Whether the section updates buffers."""
        return section in self._sections

    def table(self, section: int) -> Tensor:
        """All micro-batches of the step as int64 words; only those that ran here are not zero: a sum is exact."""
        rows = []
        for micro_batch in range(self._plan.micro_batches):
            layout, found = self._layout(section, micro_batch), self._noted.get((section, micro_batch))
            if found is None:
                rows.append(torch.zeros(layout.size_bytes, dtype=torch.uint8))
            else:
                rows.append(
                    layout.pack(dict(zip(self._names(section), found, strict=True)), copies=self._copies).whole()
                )
        return torch.cat(rows).view(torch.int64)

    def complete(self, section: int, table: Tensor) -> None:
        """Take the sum of all replicas' tables."""
        layouts = [self._layout(section, micro_batch) for micro_batch in range(self._plan.micro_batches)]
        rows = torch.split(table.view(torch.uint8), [layout.size_bytes for layout in layouts])
        self._complete[section] = [layout.unpack(row, self._copies) for layout, row in zip(layouts, rows, strict=True)]

    def apply(self, buffers: dict[str, Tensor]) -> None:
        """Update ``buffers`` with every micro-batch of the sections that are complete."""
        with torch.no_grad():
            for section, found in self._complete.items():
                for values in found:
                    self._update(self._sections[section], buffers, values)
        self.clear()

    @staticmethod
    def _update(section: SectionGraph, buffers: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
        for update in section.updates:
            given = [buffers[name] for name in update.buffers] + [found[name] for name in update.statistics]
            buffers.update(zip(update.buffers, update.module(*given), strict=True))

    def _layout(self, section: int, micro_batch: int) -> Layout:
        statistics = self._sections[section].statistics
        return Layout(statistics, len(self._plan.samples_of(micro_batch)), digests=False)

    def _names(self, section: int) -> tuple[str, ...]:
        return tuple(statistic.name for statistic in self._sections[section].statistics)
