"""Sections that run the same graph and are therefore measured once."""

import hashlib
from collections.abc import Mapping

from varuna.partition.cut.same_graph import shape_of
from varuna.partition.cut.split import SectionGraph
from varuna.partition.model import PartitionedModel


def section_kinds(model: PartitionedModel) -> tuple[int, ...]:
    """For each section, the lowest section that runs the same graph on the same shapes."""
    crossings = [crossing for cut in model.split.crossings for crossing in cut]
    shapes = {c.name: (str(c.dtype), c.fixed, c.per_example, c.differentiable) for c in crossings}
    first: dict[str, int] = {}
    return tuple(first.setdefault(_digest(section, model, shapes), section.index) for section in model.sections)


def _digest(section: SectionGraph, model: PartitionedModel, shapes: Mapping[str, object]) -> str:
    told = [
        [shapes[name] for name in section.takes],
        [shapes.get(name, "result") for name in section.makes],
        section.inputs,
        section.needs_batch_size,
        [(model.shapes[name], name in model.trainable) for name in section.parameters],
        [len(section.buffers), [tuple(model.constants[name].shape) for name in section.constants]],
        shape_of(section.module),
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()
