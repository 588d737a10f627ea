"""Bytes that a section needs while it runs, from runs on fake tensors: exact, and the same on every machine.

The sum over a graph's ops says neither what autograd saves of them nor what B needs beside it. So each kind of
section runs F, R and B once at two micro-batch sizes, without data, as ``engine.stage.section`` does; and where B can
run in halves, R, I and W.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from varuna.partition.cut.same_graph import shape_of
from varuna.partition.cut.split import BATCH_SIZE, SectionGraph
from varuna.partition.cut.split_backward import PendingWeights, retarget
from varuna.partition.graph.flow import Flow
from varuna.partition.watching.fake_mode import FakeMode
from varuna.partition.watching.live_bytes import Allocated

# two points make a line; not 1, since ops broadcast or drop a dimension of one element
_SIZES = (2, 4)
_REMEMBERED = 256


class Footprint(NamedTuple):
    """Bytes of a section while it runs, per example of the micro-batch, but for ``fixed_bytes``."""

    activation_bytes: int
    """alive between R and B, what it makes included, what it takes not"""
    forward_bytes: int
    """while F runs, which keeps nothing"""
    backward_bytes: int
    """while R or B runs, beside the activations: gradients of what it makes included"""
    fixed_bytes: int
    """of such, whatever the micro-batch: gradients of parameters on their way to their sums"""
    split_bytes: int
    """while I runs, beside the activations; as ``backward_bytes`` where B cannot run in halves"""
    split_fixed_bytes: int
    """of such, whatever the micro-batch"""
    queued_bytes: int
    """between I and W: what linears took and the gradients of what they made; 0 where B cannot run in halves"""


class _Bytes(NamedTuple):
    activation: int
    forward: int
    backward: int
    split: int
    queued: int


@dataclass(frozen=True)
class _Argument:
    """A placeholder: a tensor's shape at each of ``_SIZES``, or the number of examples."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_parameter: bool
    has_gradient: bool


_known: dict[str, Footprint | None] = {}
"""Footprints by kind of section: a model has few kinds, and is captured again for other lengths."""


def footprints(sections: Sequence[SectionGraph], flow: Flow) -> list[Footprint | None]:
    """Footprints by section; None where it cannot run without data (shapes that depend on values)."""
    placeholders = {node.name: node for node in flow.capture.graph.nodes}
    return [_of(section, _arguments(section, placeholders, flow), flow) for section in sections]


def _of(section: SectionGraph, arguments: list[_Argument | None] | None, flow: Flow) -> Footprint | None:
    if arguments is None:
        return None
    examples = _examples(flow)
    # equal layers run once: shape_of leaves out the names of nodes, in which they differ
    key = hashlib.sha256(repr((shape_of(section.module), arguments, examples)).encode()).hexdigest()
    if key not in _known:
        while len(_known) >= _REMEMBERED:
            _known.pop(next(iter(_known)))
        halved = retarget(section, flow.capture.trainable, flow.capture.shapes)
        _known[key] = _footprint(section.module, halved, arguments, examples)
    return _known[key]


def _examples(flow: Flow) -> tuple[int, int]:
    """Examples of the two micro-batches; all have the same number where a list has an entry for each."""
    opened = flow.capture.sizes
    return _SIZES if opened is None or opened.samples is None else (opened.samples, opened.samples)


def _arguments(section: SectionGraph, nodes: Mapping[str, Node], flow: Flow) -> list[_Argument | None] | None:
    """The section's arguments, in order; None stands for the number of examples."""
    arguments: list[_Argument | None] = []
    for placeholder in section.module.graph.find_nodes(op="placeholder"):
        if placeholder.target == BATCH_SIZE:
            arguments.append(None)
            continue
        node = nodes[str(placeholder.target)]
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or flow.sizes.depends_on_data(value):
            return None
        arguments.append(
            _Argument(
                shapes=tuple(flow.sizes.shape(value, size) for size in _SIZES),
                dtype=value.dtype,
                is_parameter=node.name in flow.capture.parameters,
                has_gradient=node in flow.differentiable,
            )
        )
    return arguments


def _footprint(
    whole: GraphModule,
    halved: GraphModule | None,
    arguments: Sequence[_Argument | None],
    examples: tuple[int, int],
) -> Footprint | None:
    try:
        small, large = (_run(whole, halved, arguments, index) for index in range(len(_SIZES)))
    except Exception:  # noqa: BLE001 - any op may refuse fake tensors; only an estimate is at stake
        return None
    backward_bytes, fixed_bytes = _line(small.backward, large.backward, examples)
    split_bytes, split_fixed_bytes = _line(small.split, large.split, examples)
    return Footprint(
        activation_bytes=_each(large.activation, examples),
        forward_bytes=_each(large.forward, examples),
        backward_bytes=backward_bytes,
        fixed_bytes=fixed_bytes,
        split_bytes=split_bytes,
        split_fixed_bytes=split_fixed_bytes,
        queued_bytes=_each(large.queued, examples),
    )


def _each(large_bytes: int, examples: tuple[int, int]) -> int:
    """Bytes per example, from those at the larger size."""
    # rounded up: a plan must not promise less than what is used
    return -(-large_bytes // examples[1])


def _line(small_bytes: int, large_bytes: int, examples: tuple[int, int]) -> tuple[int, int]:
    """Bytes per example, and bytes that do not depend on their number."""
    low, high = examples
    if low == high:
        return _each(large_bytes, examples), 0
    # not below 0: a kernel may need less at the larger size
    each_bytes = max(0, large_bytes - small_bytes) // (high - low)
    return each_bytes, max(0, large_bytes - each_bytes * high)


def _run(whole: GraphModule, halved: GraphModule | None, arguments: Sequence[_Argument | None], index: int) -> _Bytes:
    """Run F (at the larger size only, which alone says what it needs), R and B of one micro-batch; then R and I."""
    counted, pending = Allocated(), PendingWeights()
    with FakeMode(allow_non_fake_inputs=True), counted.watch():
        given = _given(arguments, index)
        forward_bytes = _forward_bytes(whole, given, counted) if index == len(_SIZES) - 1 else 0
        activation_bytes, backward_bytes = _recorded(whole, given, counted)
        split_bytes = backward_bytes
        if halved is not None:
            # new leaves: the whole graph's backward has left its gradients with the others
            split_bytes = _recorded(halved, [pending, *_given(arguments, index)], counted)[1]
    return _Bytes(activation_bytes, forward_bytes, backward_bytes, split_bytes, _queued_bytes(pending))


def _forward_bytes(module: GraphModule, given: Sequence[Any], counted: Allocated) -> int:
    """Bytes that F needs, which keeps nothing."""
    before_bytes = counted.now_bytes
    with torch.no_grad():
        # what is sent must be contiguous: a copy, where it is not
        _ = [value.contiguous() for value in module.forward(*given)]
    return counted.peak_bytes - before_bytes


def _recorded(module: GraphModule, given: Sequence[Any], counted: Allocated) -> tuple[int, int]:
    """Bytes that R leaves, and those that it and the backward after it need besides."""
    before_bytes = counted.now_bytes
    counted.restart()
    with torch.enable_grad():
        made = list(module.forward(*given))
    activation_bytes = counted.now_bytes - before_bytes
    # gradients that come from the next stage are there before B begins, so they count as B's
    pairs = [(value, torch.empty_like(value)) for value in made if value.requires_grad]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    return activation_bytes, counted.peak_bytes - before_bytes - activation_bytes


def _queued_bytes(pending: PendingWeights) -> int:
    """Bytes of all that W will multiply, without parameters, which exist anyway."""
    kept = (value.untyped_storage() for _, _, taken, gradient in pending.parts for value in (taken, gradient))
    # several linears may have taken one tensor (q, k, v): its memory counts once
    return sum({storage._cdata: storage.nbytes() for storage in kept}.values())


def _given(arguments: Sequence[_Argument | None], index: int) -> list[Any]:
    """Arguments without gradients, except for the parameters' sums."""
    return [_SIZES[index] if each is None else _leaf(each, index) for each in arguments]


def _leaf(argument: _Argument, index: int) -> Tensor:
    value = torch.empty(argument.shapes[index], dtype=argument.dtype)
    if argument.has_gradient:
        value.requires_grad_()
        if argument.is_parameter and argument.dtype is torch.float32:
            value.grad = torch.empty_like(value)  # the section's sums, into which B adds
    return value
