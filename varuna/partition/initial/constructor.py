"""A model built for real, as its constructor initialises it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna.core.errors import ModelError
from varuna.data.randomness import generator_lock
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import PartitionedModel


@dataclass(frozen=True)
class Initial:
    """A materialised model: parameters by first name, and every buffer."""

    module: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def to(self, dtype: torch.dtype) -> "Initial":
        """Cast the module in place; return the model in that precision."""
        return _described(self.module.to(dtype))


def materialise(recipe: Recipe, seed: int) -> Initial:
    """Build the model for real, as ``torch.manual_seed(seed); build()`` does, and leave the generator as it was."""
    with generator_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = recipe.build()
    return _described(module)


def _described(module: nn.Module) -> Initial:
    return Initial(
        module,
        {name: value.detach() for name, value in module.named_parameters()},
        dict(module.named_buffers(remove_duplicate=False)),
    )


def needed_buffers(model: PartitionedModel) -> frozenset[str]:
    """Buffers that any section, the counts of targets, or a condition, reads or updates."""
    found: set[str] = set()
    for graph in model.graphs:
        found.update(() if graph.counter is None else graph.counter.buffers)
        found.update(() if graph.whole is None else graph.whole.buffers)
        found.update(() if graph.conditions is None else graph.conditions.buffers)
        found.update(*((*section.buffers, *section.updated) for section in graph.sections))
    return frozenset(found)


def check_shapes(captured: Mapping[str, tuple[int, ...]], built: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the model that is built now is the captured one.

    Raises:
        ModelError: names or shapes differ: ``model=`` builds something else each time.
    """
    if dict(built) != dict(captured):
        odd = sorted(set(built.items()) ^ set(captured.items()))[0]
        raise ModelError(
            f"model= built a different model than the one that was captured ({odd[0]} of shape {odd[1]} is in only "
            "one of them). It must build the same module each time it is called."
        )


def select(initial: Initial, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of some parameters, so that the rest can be freed."""
    return {name: initial.parameters[name].clone() for name in names}
