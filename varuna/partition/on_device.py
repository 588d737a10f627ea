"""Sections for the device that they will run on.

A model is captured on the CPU, so its graphs name the CPU wherever they make a tensor (``arange``, masks). The facts
of the model, and its digest, are those of the capture: they are the same on machines with and without a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map

from varuna.partition.cut.split import SectionGraph
from varuna.partition.model import PartitionedModel

_CPU = torch.device("cpu")


def on_device(model: PartitionedModel, device: torch.device) -> PartitionedModel:
    """The model with sections that make their tensors on ``device``; on the CPU, ``model`` itself.

    The count of targets stays on the CPU: the samples that it looks at are there.
    """
    if device.type == "cpu":
        return model
    sections = tuple(_section(section, device) for section in model.split.sections)
    return replace(
        model,
        split=replace(model.split, sections=sections),
        variants=tuple(on_device(variant, device) for variant in model.variants),
    )


def _section(section: SectionGraph, device: torch.device) -> SectionGraph:
    updates = tuple(replace(update, module=_module(update.module, device)) for update in section.updates)
    return replace(section, module=_module(section.module, device), updates=updates)


def _module(module: GraphModule, device: torch.device) -> GraphModule:
    """A copy whose operations, those of nested regions included, name ``device``."""
    moved = GraphModule(module, _graph(module.graph, device), class_name=type(module).__name__)
    for name, inner in _nested(moved):
        setattr(moved, name, _module(inner, device))
    return moved


def _nested(module: GraphModule) -> Sequence[tuple[str, GraphModule]]:
    return [(name, inner) for name, inner in module.named_children() if isinstance(inner, GraphModule)]


def _graph(graph: Graph, device: torch.device) -> Graph:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device if value == _CPU else value
        return device.type if value == "cpu" else value  # of autocast regions

    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, node.kwargs)
    return copy
