"""Branches on the samples themselves: captured as the first samples take them, and checked for every batch.

``if mask.any():`` is a branch on data that follows from the inputs alone. Capture evaluates it for the first samples
and goes on; what it took for granted becomes a small graph from inputs to truths.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.core.errors import DataError

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ASSERT = torch.ops.aten._assert_scalar.default


@dataclass(frozen=True)
class Conditions:
    """What every batch must meet."""

    module: GraphModule
    """``(*inputs, *buffers, *constants) -> truths``"""
    inputs: tuple[str, ...]
    """keys of the batch"""
    buffers: tuple[str, ...]
    """the model's own names"""
    constants: tuple[Tensor, ...]
    places: tuple[str, ...]
    """file and line of each branch"""


def conditions_of(
    graph: Graph,
    owner: GraphModule,
    inputs: Mapping[str, str],
    buffers: Mapping[str, str],
    constants: Mapping[str, Tensor],
) -> Conditions | None:
    """The conditions of an exported graph; None if it depends on more than inputs, buffers and constants.

    Args:
        graph: as exported, its assertions in place.
        owner: holds the graphs of regions.
        inputs: placeholder -> key of the batch.
        buffers: placeholder -> name.
        constants: placeholder -> value.
    """
    truths = [node.args[0] for node in graph.nodes if node.target is _ASSERT and isinstance(node.args[0], Node)]
    needed = _ancestors(truths)
    order = [node for node in graph.nodes if node in needed]
    given = [node for node in order if node.op == "placeholder"]
    known = {**inputs, **buffers, **constants}
    if any(node.name not in known for node in given) or any(_draws(node) for node in order):
        return None
    kinds: list[list[Node]] = [[node for node in given if node.name in kind] for kind in (inputs, buffers, constants)]
    made = Graph()
    copies = {node: made.placeholder(node.name) for kind in kinds for node in kind}
    for node in order:
        if node not in copies:
            copies[node] = made.node_copy(node, lambda source: copies[source])
    made.output(tuple(copies[node] for node in truths))
    return Conditions(
        module=GraphModule(owner, made, class_name="Conditions"),
        inputs=tuple(inputs[node.name] for node in kinds[0]),
        buffers=tuple(buffers[node.name] for node in kinds[1]),
        constants=tuple(constants[node.name] for node in kinds[2]),
        places=tuple(_place(node) for node in truths),
    )


def check_conditions(
    conditions: Conditions | None, batch: Mapping[str, Tensor], indices: Sequence[int], buffers: Mapping[str, Tensor]
) -> None:
    """Compare a batch with what the capture took for granted.

    Args:
        conditions: of the model.
        batch: collated samples.
        indices: of the samples in the dataset, for the message.
        buffers: by name.

    Raises:
        DataError: a branch goes the other way.
    """
    if conditions is None:
        return
    given = [batch[key] for key in conditions.inputs]
    held = [buffers[name].cpu() for name in conditions.buffers]  # samples are looked at before they go to a device
    truths = conditions.module(*given, *held, *conditions.constants)
    for place, truth in zip(conditions.places, truths, strict=True):
        if not truth:
            raise DataError(
                f"forward() branches on the samples at {place}, and goes another way for the batch of dataset indices "
                f"{list(indices)} than for the first samples of the run, for which it was captured. Let all "
                "micro-batches be alike there (all padded, or none), or write the branch as tensor operations."
            )


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _draws(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _place(truth: Node) -> str:
    """The line of the user's code that made the last tensor on the way to a truth."""
    for node in sorted(_ancestors([truth]), reverse=True):
        frames = _FRAME.findall(node.meta.get("stack_trace") or "")
        own = [(file, line) for file, line in frames if not file.startswith(str(Path(torch.__file__).parent))]
        if own:
            return ":".join(own[-1])
    return "an unknown line"
