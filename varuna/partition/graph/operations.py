"""Identifies an operation of a graph, so that it can be found in another graph of the same model."""

from torch.fx import Node

from varuna.partition.opaque.calls import call_of

Operation = tuple[str, ...]
"""What an operation is, and the modules that it is in."""


def operation(node: Node) -> Operation:
    """The operation of one node."""
    stack = node.meta.get("nn_module_stack") or {}
    what = str(node.target)
    if call_of(node.target) is not None:  # the rest of the name tells how it is configured, and for which shapes
        what = what.rpartition("_")[0]
    return (what, *(str(path) for path, _ in stack.values()))
