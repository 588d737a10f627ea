"""Parameters outside of the model that ``forward`` or ``loss=`` computes with: a graph would keep first values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.fx import Graph, Node

from varuna.core.errors import ModelError
from varuna.partition.graph.operations import op_name
from varuna.partition.graph.shared_memory import SharedMemory, written_arguments
from varuna.partition.originals.referred import tensors_and_modules
from varuna.partition.watching.explaining import ForwardFindings, Outside

_DETACHING = ("aten::detach", "aten::detach_")


def check_outside(
    graph: Graph, constants: Mapping[str, Tensor], noticed: ForwardFindings, *, trains_nothing_else: bool
) -> None:
    """Refuse a constant that requires a gradient, if the loss has one.

    Args:
        graph: as exported.
        constants: by placeholder.
        noticed: what was computed with.
        trains_nothing_else: no parameter is trained that is no part of the model.

    Raises:
        ModelError: the graph has one; names the line.
    """
    memory = SharedMemory(graph)
    for node in graph.nodes:
        if node.op != "placeholder" or node.name not in constants or memory.writers(node):
            continue  # a constant that forward writes is refused elsewhere
        found = noticed.outside.get(constants[node.name].untyped_storage().data_ptr())
        if found is None or (found.is_leaf and trains_nothing_else) or not _reaches_loss(graph, memory, node):
            continue
        raise ModelError(_message(found))


@contextmanager
def own_buffers_kept(function: object) -> Iterator[None]:
    """Refuse a function of the script's that replaces a buffer of a module, after the script's has got its own back.

    Raises:
        ModelError: names the buffer.
    """
    found = [each for each in tensors_and_modules(function).values() if isinstance(each, nn.Module)]
    before = [
        (each, name, value) for outer in found for each in outer.modules() for name, value in each._buffers.items()
    ]
    try:
        yield
    finally:
        written = [(module, name) for module, name, value in before if module._buffers.get(name) is not value]
        for module, name, value in before:
            module._buffers[name] = value
    if written:
        module, name = written[0]
        raise ModelError(
            f"loss= writes {name} of {type(module).__name__} for the next step, and that is no part of the model. "
            "Pass as model= a module that has the model and the loss, and whose forward() returns the loss."
        )


def _reaches_loss(graph: Graph, memory: SharedMemory, source: Node) -> bool:
    """Return whether a gradient of the loss reaches a value."""
    output = next(node for node in graph.nodes if node.op == "output")
    reached, before = {source}, 0
    while len(reached) > before:
        before = len(reached)
        written = {place for node in reached for each in written_arguments(node) for place in memory.of(each)}
        for node in graph.nodes:
            takes = not reached.isdisjoint(node.all_input_nodes) or not written.isdisjoint(memory.of(node))
            if takes and node is not output and op_name(node) not in _DETACHING and _has_gradient(node):
                reached.add(node)
    return output.args[0][0] in reached


def _has_gradient(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _message(found: Outside) -> str:
    what = "a parameter" if found.is_leaf else "a tensor computed from parameters"
    where = f" at {found.where}" if found.where else ""
    return (
        f"forward() or loss= computes{where} with {what} of shape {found.shape} that is no part of "
        "the model, and would keep its first values. If it shall train: pass a loss that has parameters as a module, "
        "loss=MyLoss(), whose forward takes (output, labels) or (output, batch), and it trains, is saved and exported "
        "with the model; or assign it, or the module that has it, to an attribute of the model in the model's "
        "constructor. If it shall not: call requires_grad_(False) on it."
    )
