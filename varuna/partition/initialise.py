"""A model built for real, as its constructor initialises it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna.core.errors import ModelError
from varuna.data.randomness import generator_lock
from varuna.partition.capture import Recipe
from varuna.partition.model import PartitionedModel


@dataclass(frozen=True)
class Initial:
    """A materialised model: parameters by first name, and every buffer."""

    module: nn.Module
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def materialise(recipe: Recipe, seed: int) -> Initial:
    """Build the model for real, as ``torch.manual_seed(seed); build()`` does, and leave the generator as it was."""
    with generator_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = recipe.build()
    return Initial(
        module,
        {name: value.detach() for name, value in module.named_parameters()},
        dict(module.named_buffers(remove_duplicate=False)),
    )


def needed_buffers(model: PartitionedModel) -> frozenset[str]:
    """Buffers that any section, or the count of targets, reads."""
    counter = () if model.counter is None else model.counter.buffers
    return frozenset(counter).union(*(section.buffers for section in model.sections))


def check_shapes(captured: Mapping[str, tuple[int, ...]], built: Mapping[str, tuple[int, ...]]) -> None:
    """The model that is built now must be the captured one.

    Raises:
        ModelError: names or shapes differ: ``model=`` builds something else each time.
    """
    if dict(built) != dict(captured):
        odd = sorted(set(built.items()) ^ set(captured.items()))[0]
        raise ModelError(
            f"model= built another model than the one that was captured ({odd[0]} of shape {odd[1]} is in only one of "
            "them). It must build the same module each time it is called."
        )


def select(initial: Initial, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of some parameters, so that the rest can be freed."""
    return {name: initial.parameters[name].clone() for name in names}
