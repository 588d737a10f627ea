"""Parameters that may be on the device only while their section runs: no step changes them, and autograd says when it
keeps them for the backward.

An operation with a backward of its own may keep what it was given wherever it likes: it is tried, without data.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from varuna.partition.cut.split import SectionGraph
from varuna.partition.opaque.calls import call_of

_TORCHS = ("aten", "prims", "prim")
_OWN_BACKWARDS = ("Autograd", "CompositeImplicitAutograd")


def streamable(sections: Iterable[SectionGraph], changing: frozenset[str]) -> frozenset[str]:
    """Return the names of parameters that may be on the device only while their section runs.

    Args:
        sections: of the model, as it was captured.
        changing: names that steps change, or compute others from.
    """
    names, staying = set[str](), set[str](changing)
    for section in sections:
        (names if _keeps_openly(section.module.graph) else staying).update(section.parameters)
    return frozenset(names - staying)


def _keeps_openly(graph: Graph) -> bool:
    """Return whether all operations of a graph and its regions save by autograd's own means what they keep."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not _saves(node, node.target):
            return False
        inner = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, GraphModule) and not _keeps_openly(inner.graph):
            return False
    return True


def _saves(node: Node, operation: torch._ops.OpOverload) -> bool:
    if operation.namespace in _TORCHS:
        return True
    if call_of(operation) is not None:
        return False
    name, has_kernel = operation._schema.name, torch._C._dispatch_has_kernel_for_dispatch_key
    return not any(has_kernel(name, key) for key in _OWN_BACKWARDS) or _lets_go(node, operation)


def _lets_go(node: Node, operation: torch._ops.OpOverload) -> bool:
    """Return whether nothing but autograd keeps what may be a parameter, once the operation has run forward."""
    with FakeTensorMode(), torch.enable_grad(), saved_tensors_hooks(lambda value: None, lambda nothing: nothing):
        try:
            given = {each: _like(each.meta["val"]) for each in node.all_input_nodes}
            args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
            storages = [given[each].untyped_storage() for each in given if _may_be_parameter(each)]
            memory = [StorageWeakRef(each) for each in storages]  # type: ignore[no-untyped-call]
            made = operation(*args, **kwargs)  # with its backward, and what that has
        except Exception:  # noqa: BLE001 - whatever an operation raises: it was not seen to let go
            return False
        del given, args, kwargs, storages
        return made is not None and all(each.expired() for each in memory)  # type: ignore[no-untyped-call]


def _like(value: Any) -> Any:
    """Something like a node's value: a tensor that is no leaf, for which autograd itself has no use, or a number."""
    if not isinstance(value, Tensor):
        return value.node.hint if isinstance(value, torch.SymInt) else value
    shape = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    made = torch.empty(shape, dtype=value.dtype, device=value.device)
    return made.requires_grad_() * 1 if made.is_floating_point() else made


def _may_be_parameter(node: Node) -> bool:
    """Return whether a value may lie in the memory of an argument of the section."""
    while node.op == "call_function":
        results = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
        if node.target is not operator.getitem and not any(each.alias_info for each in results):
            return False
        node = node.all_input_nodes[0]
    return True
