"""A model that is too large to be run whole, looked at without data: only shapes flow through it.

What is seen so: which parameters get a gradient at all, hooks, draws from Python and NumPy, counters. What is not:
values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from varuna.checks.causes import COUNTERS, DRAWS, HOOKS, Found
from varuna.checks.compare import Difference
from varuna.checks.module_state import changed, plain_values
from varuna.checks.outcome import Part, run_sections
from varuna.checks.probes import ENDS, answer_near
from varuna.data.randomness import seeded
from varuna.partition.capture.building import build_without_data, cast_fakes
from varuna.partition.capture.capture import LossModule, Recipe
from varuna.partition.initial.constructor import Initial
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel
from varuna.partition.originals.modes import into_training
from varuna.partition.watching.fake_mode import FakeMode
from varuna.partition.watching.side_effects import Respond, Seen, gradient_hooks, watched


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs: operations, shapes and numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One op."""
        leaves = tree_leaves((args, kwargs))
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else repr(each) for each in leaves]
        if func.namespace != "prim":  # questions that are asked once
            self.found.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Forward:
    """The record of a forward without data."""

    operations: tuple[str, ...]
    seen: Seen
    loss: Tensor


def look_without_data(
    model: PartitionedModel, recipe: Recipe, part: Part
) -> tuple[Found, list[Difference], Sequence[str]]:
    """Find certain causes, missing gradients and reentrant checkpoints without data.

    Args:
        model: as captured.
        recipe: the same.
        part: a micro-batch; only shapes matter.

    Raises:
        Exception: whatever the model's own code raises without data.
    """
    mode = FakeMode(allow_non_fake_inputs=True)
    with seeded(0, "self-check"):
        module = _built(recipe, mode)
        hooks = tuple(gradient_hooks(module))
        with mode:
            tensors = {key: torch.empty_like(value) for key, value in part.tensors.items()}
            losses = LossModule(module, recipe)
            before = plain_values(module)
            first = _forward(losses, tensors)
            moved = changed(before, plain_values(module))
            first.loss.backward()  # type: ignore[no-untyped-call]
            expected = {name for name, value in module.named_parameters() if value.grad is not None}
            found: Found = {
                HOOKS: (*hooks, *first.seen.hooks),
                DRAWS: first.seen.draws if first.seen.draws and _depends(losses, tensors, first) else (),
                COUNTERS: tuple(moved) if moved and _forward(losses, tensors).operations != first.operations else (),
            }
            numbers = {key: torch.empty_like(value) for key, value in part.numbers.items()}
            missing = sorted(expected - _reached(model, module, Part(tensors, part.indices, 1.0, numbers)))
    odd = [Difference("gradient", name, 1.0, 1.0, found=0.0, expected=1.0) for name in missing]
    return found, odd, first.seen.reentrant


def _built(recipe: Recipe, mode: FakeMode) -> nn.Module:
    """Build the model with its hooks, where the constructor needs no data; else without its parameters' hooks."""
    try:
        with mode:
            module = recipe.build()
    except Exception:  # noqa: BLE001 - whatever the constructor does with values
        module = build_without_data(recipe.build, mode).module
    if recipe.dtype is not torch.float32:
        cast_fakes(module, mode, recipe.dtype)
    return into_training(module)


def _forward(losses: LossModule, tensors: Mapping[str, Tensor], respond: Respond | None = None) -> _Forward:
    operations = _Operations()
    with watched(respond) as seen, operations:
        loss = losses(dict(tensors))[0]
    return _Forward(tuple(operations.found), seen, loss)


def _depends(losses: LossModule, tensors: Mapping[str, Tensor], first: _Forward) -> bool:
    """Return whether other draws lead to other operations, or to other numbers in them."""
    return any(_forward(losses, tensors, answer_near(end)).operations != first.operations for end in ENDS)


def _reached(model: PartitionedModel, module: nn.Module, part: Part) -> set[str]:
    """Parameters that get a gradient from the sections."""
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    sums: dict[str, Tensor] = {}
    graph = model.graphs[variant_of(model, part.tensors, part.indices)]
    run_sections(graph, Initial(module, parameters, buffers), buffers, part, 1.0, sums)
    return set(sums)
