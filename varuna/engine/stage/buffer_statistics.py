"""What buffers that forward() writes are updated from, and the update itself (batch normalisation).

A section returns the statistics of each micro-batch next to its results. Those of the micro-batch's first run in
a step count (F), never those of a recompute (R). When a section is through with a step, its replicas tell each other
theirs; the commit then applies all of them, in the order of micro-batches. So what the buffers become depends on
neither P nor D, and an undone step leaves no trace.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.core.sums import Spans, numbers_of
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.links.message import Layout
from varuna.engine.stage.sums import Begun
from varuna.partition.cut.split import SectionGraph


class Statistics:
    """Statistics of one step, for the sections of one stage."""

    def __init__(
        self, sections: Sequence[SectionGraph], plan: Plan, copies: HostCopies, begun: Begun | None = None
    ) -> None:
        """Begin without any, or with those that belong to the sums of gradients that another generation has left."""
        self._sections = {section.index: section for section in sections if section.updates}
        self._plan = plan
        self._copies = copies
        self._noted: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._complete: dict[int, list[dict[str, Tensor]]] = {}
        self._inherited = begun is not None
        self._elsewhere: dict[int, frozenset[int]] = {}  # by section: some replica has them since an earlier generation
        if begun is not None:
            self._elsewhere = {each.section: frozenset(numbers_of(each.micro_batches)) for each in begun.rest.kept}
            for section, rows in begun.statistics.items():
                taken = [each.micro_batches for each in begun.rest.taken if each.section == section]
                self._take(section, [number for spans in taken for number in numbers_of(spans)], rows)

    def clear(self) -> None:
        """Begin a step, perhaps again: without any, or in the first step with what was inherited."""
        if not self._inherited:
            self._elsewhere = {}
            self._noted.clear()
            self._complete.clear()
        self._inherited = False

    def note(self, section: int, micro_batch: int, found: Sequence[Tensor]) -> None:
        """Keep what the first run of a micro-batch found; whatever runs it again is ignored."""
        if micro_batch in self._elsewhere.get(section, ()):
            return
        self._noted.setdefault((section, micro_batch), tuple(value.detach() for value in found))

    def carried(self, section: int, micro_batches: Spans) -> Tensor | None:
        """Those that belong to a sum of gradients, as bytes, in the order of micro-batches; None: it has none."""
        if section not in self._sections:
            return None
        complete, rows = self._complete.get(section), [torch.empty(0, dtype=torch.uint8)]
        for number in numbers_of(micro_batches):
            noted = self._noted.get((section, number))
            found = (
                complete[number] if complete is not None else dict(zip(self._names(section), noted or (), strict=True))
            )
            rows.append(self._layout(section, number).pack(found, copies=self._copies).whole())
        return torch.cat(rows)

    def _take(self, section: int, micro_batches: Sequence[int], rows: Tensor) -> None:
        layouts = [self._layout(section, number) for number in micro_batches]
        for number, layout, row in zip(
            micro_batches, layouts, torch.split(rows, [layout.size_bytes for layout in layouts]), strict=True
        ):
            found = layout.unpack(row.clone(), self._copies)
            self._noted[section, number] = tuple(found[name] for name in self._names(section))

    @property
    def sections(self) -> Collection[int]:
        """Sections that update buffers."""
        return self._sections

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
        self._inherited = False
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
