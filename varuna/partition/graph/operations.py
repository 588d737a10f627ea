"""Names and arguments of the operations of a graph."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch
from torch.fx import Node

from varuna.partition.opaque.calls import call_of

T = TypeVar("T", bound=Hashable)
Operation = tuple[str, ...]
"""Name of an operation, and the modules that it is in."""


def op_name(node: Node) -> str:
    """``"aten::linear"`` for an ATen call, else ``""``."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def flat(arguments: Iterable[object]) -> list[Node]:
    """Nodes among arguments, those in lists too."""
    found: list[Node] = []
    for argument in arguments:
        if isinstance(argument, Node):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found.extend(flat(argument))
    return found


def sources_of(starts: Iterable[Node]) -> set[Node]:
    """The nodes, and all that they are computed from, as they name it."""
    return closure(starts, lambda node: node.all_input_nodes)


def closure(starts: Iterable[T], behind: Callable[[T], Iterable[T]]) -> set[T]:
    """Return the starts, what is behind each of them, what is behind that, and so on."""
    found, left = set[T](), list(starts)
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left.extend(behind(each))
    return found


def operation(node: Node) -> Operation:
    """The operation of one node, by which it is found in another graph of the same model."""
    stack = node.meta.get("nn_module_stack") or {}
    what = str(node.target)
    if call_of(node.target) is not None:  # the rest of the name tells how it is configured, and for which shapes
        what = what.rpartition("_")[0]
    return (what, *(str(path) for path, _ in stack.values()))
