"""Statistics from which buffers that forward() writes are updated, and the update itself.

A section returns the statistics of each micro-batch next to its results. Those of the micro-batch's first run in
a step count (F), never those of a recompute (R). When a section is through with a step, its replicas tell each other
theirs; the commit then applies all of them, in the order of micro-batches. So what the buffers become depends on
neither P nor D, and an undone step leaves no trace.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from varuna.core.plan import Plan
from varuna.core.sums import IndexSet, numbers_of
from varuna.engine.device.host_copies import HostCopies
from varuna.engine.links.message import Layout
from varuna.engine.stage.sums import ResumedStep
from varuna.partition.apply_updates import MicroBatchStatistics, apply_updates
from varuna.partition.cut.split import Crossing, SectionGraph


class Statistics:
    """Statistics of one step, for the sections of one stage."""

    def __init__(
        self, sections: Sequence[SectionGraph], plan: Plan, copies: HostCopies, begun: ResumedStep | None = None
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

    def keep_found(self, section: int, micro_batch: int, found: Sequence[Tensor]) -> None:
        """Keep what the first run of a micro-batch found; whatever runs it again is ignored."""
        if micro_batch in self._elsewhere.get(section, ()):
            return
        names = {each.name for each in self._kept(section, micro_batch)}
        statistics = zip(self._sections[section].statistics, found, strict=True)
        kept = tuple(value.detach() for each, value in statistics if each.name in names)
        # ``setdefault``: F comes first, and R's are not to count again.
        self._noted.setdefault((section, micro_batch), kept)

    def as_bytes(self, section: int, micro_batches: IndexSet) -> Tensor | None:
        """Pack those that belong to a sum of gradients, in the order of micro-batches; None: the section has none."""
        if section not in self._sections:
            return None
        rows = [torch.empty(0, dtype=torch.uint8)]
        for number in numbers_of(micro_batches):
            found = self._found(section, number)
            rows.append(self._layout(section, number).pack(found, copies=self._copies).whole())
        return torch.cat(rows)

    def _found(self, section: int, number: int) -> Mapping[str, Tensor]:
        """Find those of one micro-batch; another thread may be completing the section: what was noted goes last."""
        noted = self._noted.get((section, number))
        if noted is None:
            return self._complete[section][number]
        return dict(zip(self._names(section, number), noted, strict=True))

    def _take(self, section: int, micro_batches: Sequence[int], rows: Tensor) -> None:
        layouts = [self._layout(section, number) for number in micro_batches]
        for number, layout, row in zip(
            micro_batches, layouts, torch.split(rows, [layout.size_bytes for layout in layouts]), strict=True
        ):
            found = layout.unpack(row.clone(), self._copies)
            self._noted[section, number] = tuple(found[name] for name in self._names(section, number))

    @property
    def sections(self) -> Collection[int]:
        """Sections that update buffers."""
        return self._sections

    def has(self, section: int) -> bool:
        """Return whether the section updates buffers."""
        return section in self._sections

    def table(self, section: int) -> Tensor:
        """Make a table of the step's micro-batches, int64 words, zero but for those that ran here: a sum is exact."""
        layouts = self._layouts(section)
        sizes_bytes = [layout.size_bytes for layout in layouts]
        table = torch.zeros(sum(sizes_bytes), dtype=torch.uint8)
        for micro_batch, (layout, row) in enumerate(zip(layouts, torch.split(table, sizes_bytes), strict=True)):
            found = self._noted.get((section, micro_batch))
            if found is not None:
                named = dict(zip(self._names(section, micro_batch), found, strict=True))
                row.copy_(layout.pack(named, copies=self._copies).whole())
        # As integers, whatever they are: a sum in which all but one term are zero keeps every bit, NaN's included.
        return table.view(torch.int64)

    def complete(self, section: int, table: Tensor | None = None) -> None:
        """Take the sum of all replicas' tables, instead of this one's own; None: it is the only one, and has all."""
        numbers = range(self._plan.micro_batches)
        if table is None:
            own = {number: self._noted[section, number] for number in numbers}
            self._complete[section] = [
                dict(zip(self._names(section, number), each, strict=True)) for number, each in own.items()
            ]
        else:
            self._complete[section] = self._in(section, table)
        for number in numbers:
            # After ``_complete`` is set: ``_found`` looks here first, and then there.
            self._noted.pop((section, number), None)

    def _in(self, section: int, table: Tensor) -> list[dict[str, Tensor]]:
        """Unpack a table, by micro-batch."""
        layouts = self._layouts(section)
        rows = torch.split(table.view(torch.uint8), [layout.size_bytes for layout in layouts])
        return [layout.unpack(row, self._copies) for layout, row in zip(layouts, rows, strict=True)]

    def apply(self, buffers: Mapping[str, Tensor]) -> None:
        """Update ``buffers`` in place, with every micro-batch of the sections that are complete."""
        for section, found in self._complete.items():
            examples = (len(self._plan.samples_of(number)) for number in range(self._plan.micro_batches))
            apply_updates(self._sections[section].updates, buffers, list(map(MicroBatchStatistics, examples, found)))
        self._inherited = False
        self.clear()

    def _layouts(self, section: int) -> list[Layout]:
        return [self._layout(section, micro_batch) for micro_batch in range(self._plan.micro_batches)]

    def _layout(self, section: int, micro_batch: int) -> Layout:
        statistics = self._kept(section, micro_batch)
        return Layout(statistics, len(self._plan.samples_of(micro_batch)), digests=False)

    def _names(self, section: int, micro_batch: int) -> tuple[str, ...]:
        return tuple(statistic.name for statistic in self._kept(section, micro_batch))

    def _kept(self, section: int, micro_batch: int) -> tuple[Crossing, ...]:
        """Return the statistics that a micro-batch has to tell: what is the same in all, the first one tells."""
        graph = self._sections[section]
        # One micro-batch is enough for what is the same in all: the first has it, on whichever replica.
        if micro_batch == 0:
            return graph.statistics
        told = {
            name
            for update in graph.updates
            for name, kind in zip(update.statistics, update.kinds or ("sum",) * len(update.statistics), strict=True)
            if kind != "same"
        }
        return tuple(each for each in graph.statistics if each.name in told)
