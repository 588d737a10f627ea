"""Layouts of the messages that a stage takes and gives, by step and global micro-batch."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from varuna.core.plan import Plan
from varuna.engine.links.message import Layout
from varuna.engine.pipeline.length_variants import ToldBySamples, Variants
from varuna.partition.model import PartitionedModel

_REMEMBERED = 1024


@dataclass(frozen=True)
class Layouts:
    """The layouts of all messages of one stage in one generation.

    Messages have the lengths that follow from the plan and from what samples tell. ``rows`` is how many their tensors
    have, where collate has left samples out.
    """

    plan: Plan
    sections: range
    """of the stage"""
    graphs: tuple[PartitionedModel, ...]
    """one for each declared length"""
    variants: Variants
    """tell the variant that a micro-batch is for"""
    apart: Collection[int]
    """sections into which values travel apart from their header"""
    _made: dict[tuple[int, ToldBySamples, int, int | None, bool], Layout] = field(
        default_factory=dict, repr=False, compare=False
    )
    """by section, what samples told, examples, and whether they are of gradients: a step needs few, each many times"""

    def activation_in(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Layout of what the previous stage sends."""
        return self._into(self.sections.start, step, micro_batch, rows)

    def activation_out(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Layout of what is sent to the next stage."""
        return self._into(self.sections.stop, step, micro_batch, rows)

    def gradient_in(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Layout of what the next stage sends back."""
        return self._into(self.sections.stop, step, micro_batch, rows, gradients=True)

    def gradient_out(self, step: int, micro_batch: int, rows: int | None = None) -> Layout:
        """Layout of what is sent back to the previous stage."""
        return self._into(self.sections.start, step, micro_batch, rows, gradients=True)

    def _into(self, section: int, step: int, micro_batch: int, rows: int | None, *, gradients: bool = False) -> Layout:
        told, examples = self.variants.told(step, micro_batch), len(self.plan.samples_of(micro_batch))
        rows = None if rows == examples or self.graphs[told.variant].sizes is not None else rows
        key = (section, told, examples, rows, gradients)
        if key not in self._made:
            while len(self._made) >= _REMEMBERED:
                self._made.pop(next(iter(self._made)))
            crossings = self.graphs[told.variant].split.crossings[section]
            apart = section in self.apart
            whole = Layout(crossings, examples, digests=True, apart=apart, rows=rows, sizes=told.sizes)
            self._made[key] = _differentiable(whole) if gradients else whole
        return self._made[key]


def _differentiable(layout: Layout) -> Layout:
    return replace(layout, crossings=tuple(c for c in layout.crossings if c.differentiable), digests=False)
