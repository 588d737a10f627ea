"""Which sections run the same graph: they are measured as one (DESIGN §5.3)."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from varuna.partition.model import PartitionedModel
from varuna.partition.split import SectionGraph


def section_kinds(model: PartitionedModel) -> tuple[int, ...]:
    """By section: the lowest section that runs the same graph on the same shapes."""
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
        _shape_of(section.module),
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _shape_of(module: GraphModule) -> list[Any]:
    """The graph without the names of its nodes: (op, target, arguments as positions of earlier nodes)."""
    position: dict[Node, int] = {}
    rows: list[Any] = []
    for node in module.graph.nodes:
        target: Any = str(node.target) if node.op.startswith("call") else None
        if node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            target = _shape_of(inner) if isinstance(inner, GraphModule) else tuple(getattr(inner, "shape", ()))
        rows.append((node.op, target, _plain(node.args, position), _plain(node.kwargs, position)))
        position[node] = len(position)
    return rows


def _plain(value: Any, position: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        return ("node", position[value])
    if isinstance(value, Mapping):
        return sorted((key, repr(_plain(each, position))) for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each, position) for each in value]
    return repr(value)
