"""Graphs as plain values and back: operations by name, looked up where they are read; nothing is ever unpickled."""

import keyword
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.partition.opaque import autograd_functions, calls

Encode = Callable[[Any], Any]
"""A value as plain ones."""

_OWN = (calls.NAMESPACE, autograd_functions.NAMESPACE)
"""Namespaces of operations that exist only in the process that has captured them."""
_FUNCTIONS = {
    **{f"operator.{name}": getattr(operator, name) for name in operator.__all__},
    **{f"math.{name}": each for name, each in vars(math).items() if callable(each)},
    **{f"torch.{name}": each for name, each in vars(torch).items() if name.startswith("sym_") and callable(each)},
}
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}


class CannotShareError(Exception):
    """A model has something that means nothing to another process, or bytes are not those of a model."""


def graph_values(module: GraphModule, encode: Encode) -> dict[str, Any]:
    """Return the values that a graph is made of.

    Args:
        module: the graph, with what its nodes read of it.
        encode: writes arguments, in which nodes stand for themselves.

    Raises:
        CannotShareError: it calls what only this process knows.
    """
    held = {node.target: _attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    return {
        "name": type(module).__name__,
        "training": module.training,
        "held": {str(target): encode(value) for target, value in held.items()},
        "nodes": [
            [node.op, node.name, _target_name(node), encode(node.args), encode(dict(node.kwargs)), _kind(node)]
            for node in module.graph.nodes
        ],
    }


def graph_of(values: Mapping[str, Any], decode: Callable[[Any, Mapping[str, Node]], Any]) -> GraphModule:
    """Inverse of ``graph_values``.

    Args:
        values: what it returned.
        decode: reads arguments, given the nodes by name.

    Raises:
        CannotShareError: they are no graph's, or this process does not have an operation.
    """
    graph, nodes = Graph(), dict[str, Node]()
    held = {_path(target): decode(value, {}) for target, value in values["held"].items()}
    for op, name, target, args, kwargs, kind in values["nodes"]:
        called = function_of(target) if op == "call_function" else _path(target)
        if op not in ("placeholder", "get_attr", "call_function", "output"):
            raise CannotShareError(f"a node does {op!r}")
        named = {_path(key): value for key, value in decode(kwargs, nodes).items()}
        node = graph.create_node(op, called, decode(args, nodes), named, name=_path(name))
        # fx renames a second node of one name; arguments, placeholders and digests would then mean another one
        if node.name != name:
            raise CannotShareError(f"two nodes are called {name}")
        if kind is not None:
            node.meta["val"] = _like(kind)
        nodes[name] = node
    module = GraphModule(held, graph, class_name=_path(values["name"]))
    module.train(bool(values["training"]))
    return module


def _attribute(module: GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _target_name(node: Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace in _OWN:
            raise CannotShareError(f"{target} runs code of this process")
        return f"torch.ops.{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target._name}"
    name = _NAMES.get(id(target))
    if name is None:
        raise CannotShareError(f"{node} calls {target}")
    return name


@cache
def function_of(name: str) -> Any:
    """The operation or function that a graph calls by this name.

    Raises:
        CannotShareError: there is none.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    found: Any = torch.ops
    parts = name.removeprefix("torch.ops.").split(".")
    if not name.startswith("torch.ops.") or len(parts) not in (2, 3) or parts[0] in _OWN:
        raise CannotShareError(f"there is no operation {name!r}")
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError) as error:
        raise CannotShareError(f"there is no operation {name!r} here") from error
    if not isinstance(found, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        raise CannotShareError(f"{name!r} is no operation")
    return found


def _path(text: Any) -> str:
    """A name, or names with dots: they become code of a graph, so they may be nothing else."""
    parts = text.split(".") if isinstance(text, str) else [""]
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise CannotShareError(f"{text!r} cannot be a name")
    return str(text)


def _kind(node: Node) -> Any:
    """The dtype and dimensions of what a node makes: all that is asked of it once the graph has been cut."""
    return _kind_of(node.meta.get("val"))


def _kind_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), value.dim()]
    return {"of": [_kind_of(each) for each in value]} if isinstance(value, list | tuple) else None


def _like(kind: Any) -> Any:
    if isinstance(kind, dict):
        return [_like(each) for each in kind["of"]]
    return None if kind is None else _stand_in(*kind)


@cache
def _stand_in(dtype: str, dims: int) -> Tensor:
    return torch.empty((0,) * dims, dtype=dtype_of(dtype), device="meta")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        CannotShareError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CannotShareError(f"there is no dtype {name!r}")
    return found
