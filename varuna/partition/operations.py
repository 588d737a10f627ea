"""What an operation of a graph is, so that it can be found again in another graph of the same model."""

from torch.fx import Node

Operation = tuple[str, ...]
"""What an operation is, and the modules that it is in."""


def operation(node: Node) -> Operation:
    """Of one node."""
    stack = node.meta.get("nn_module_stack") or {}
    return (str(node.target), *(str(path) for path, _ in stack.values()))
