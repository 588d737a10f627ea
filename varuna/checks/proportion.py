"""Is a gradient that an autograd Function returns in proportion to the one that it is given?

A step starts the backward of each micro-batch with its weight (the number of its targets, times the scale of fp16), and
divides the sum afterwards. A backward that does not multiply by what arrives, such as one that hangs an auxiliary loss
onto an activation with the gradient 1, would train another model in every plan.
"""

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.checks.draws import SameDraws
from varuna.checks.experiment import Experiment
from varuna.checks.outcome import Part, controlled, run_plainly, same_buffers
from varuna.core.errors import ModelError
from varuna.partition.capture.capture import LossModule
from varuna.partition.model import PartitionedModel

_SCALES = {torch.float16: (4.0,)}
"""Powers of two, by which a gradient in proportion is multiplied to the bit; large ones would overflow in half."""
_SCALES_ELSE = (4.0, 1024.0)
_TOLERANCE = 1e-3


class _Passed(NamedTuple):
    function: type
    into: tuple[Tensor | None, ...]
    out: tuple[Tensor | None, ...]


def check_proportion(experiment: Experiment, part: Part) -> None:
    """Run the backward of the plain model, begun with several scales, and compare what its Functions return.

    Args:
        experiment: with the model as it trains.
        part: a micro-batch.

    Raises:
        ModelError: one returns something else than a multiple; names it and its line.
    """
    if not _has_functions(experiment.model):
        return
    losses = experiment.losses
    once = _passed(losses, part, 1.0)
    for scale in _SCALES.get(losses.dtype, _SCALES_ELSE) if once else ():
        for one, other in zip(once, _passed(losses, part, scale), strict=False):
            if one.function is not other.function:
                break
            if _in_proportion(one.into, other.into, scale) and not _in_proportion(one.out, other.out, scale):
                raise ModelError(_message(one.function))


def _has_functions(model: PartitionedModel) -> bool:
    """Return whether the graph holds operations that are not torch's own."""
    targets = (node.target for graph in model.graphs for s in graph.sections for node in s.module.graph.nodes)
    return any(isinstance(target, torch._ops.OpOverload) and target.namespace != "aten" for target in targets)


def _passed(losses: LossModule, part: Part, scale: float) -> list[_Passed]:
    """Return what each Function of the model is given and returns in the backward, in its order."""
    found: list[_Passed] = []
    losses.zero_grad()
    try:
        with same_buffers(losses.model), controlled(SameDraws):
            loss, _ = run_plainly(losses, part)
            for node in _functions(loss):
                node.register_hook(partial(_note, found, type(node)._forward_cls))
            if loss.requires_grad:
                torch.autograd.backward([loss], [torch.full_like(loss, scale)])
    finally:
        losses.zero_grad()
    return found


def _note(found: list[_Passed], function: type, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
    found.append(_Passed(function, _copies(into), _copies(out)))


def _functions(loss: Tensor) -> Iterator[Any]:
    """Nodes of Functions that are not torch's own, from the loss on."""
    stack, seen = [loss.grad_fn], set[Any]()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(before for before, _ in node.next_functions)
        kind = getattr(type(node), "_forward_cls", None)
        if kind is not None and not kind.__module__.startswith("torch."):
            yield node


def _copies(values: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if value is None else value.detach().clone() for value in values)


def _in_proportion(one: Sequence[Tensor | None], other: Sequence[Tensor | None], scale: float) -> bool:
    return all(_multiple(a, b, scale) for a, b in zip(one, other, strict=True))


def _multiple(one: Tensor | None, other: Tensor | None, scale: float) -> bool:
    if one is None or other is None or not one.numel():
        return one is other or one is None or other is None or not other.numel()
    expected, found = one.double(), other.double() / scale
    if not (expected.isfinite().all() and found.isfinite().all()):
        return True  # what cannot be compared; the check of gradients says more
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max().clamp_min(1e-30))


def _message(function: type) -> str:
    try:
        where = f" at {inspect.getsourcefile(function)}:{inspect.getsourcelines(function.backward)[1]}"  # type: ignore[attr-defined]
    except (TypeError, OSError, AttributeError):
        where = ""
    return (
        f"the backward of {function.__name__}{where} returns a gradient that is not in proportion to the one that it "
        "is given. Varuna starts the backward of each micro-batch with the weight of its samples and divides the sum, "
        "as gradient accumulation and loss scaling do in plain PyTorch, so it would train another model. Let backward "
        "multiply what it returns by what it is given. If it hangs an auxiliary loss onto an activation, return that "
        "loss from forward() instead, and add it to the model's loss."
    )
