"""Findings of the tracer, and the one that needs no dry run: parameters in the same memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import Initial
from varuna.partition.model import PartitionedModel
from varuna.partition.watching.user_lines import place_of


@dataclass(frozen=True)
class Dependency:
    """Something that a pipeline would compute differently from one process."""

    kind: str
    """``mixed``: an operation over several sections; ``number``: numbers of several sections, added up in Python;
    ``untagged``: a tensor from outside the step; ``shared weight``; ``effect``: seen, but not where it comes from"""
    sections: tuple[int, ...]
    names: tuple[str, ...]
    """parameters whose values, gradients or states are involved"""
    where: str
    """file:line, outside torch and Varuna"""
    operation: str
    remedy: str


def shared_weights(model: PartitionedModel, recipe: Recipe, initial: Initial) -> list[Dependency]:
    """Parameters that are different objects in the same memory: one process trains one weight, stages two."""
    where = str(place_of(recipe.build))
    used = dict.fromkeys(name for section in model.sections for name in section.parameters)
    return [
        Dependency(
            "shared weight",
            tuple(sorted({model.owner_of(one), model.owner_of(other)})),
            (one, other),
            where,
            "two parameters in the same memory",
            "Varuna ties parameters that are one object. Assign the parameter, not its data (head.weight = "
            "embed.weight), or clone it (head.weight.data = embed.weight.data.clone()) if they should differ.",
        )
        for one, other in _overlapping({name: initial.parameters[name] for name in used})
        if not model.trainable.isdisjoint((one, other))
    ]


def _overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs that share memory, in the order of addresses."""
    extents = sorted((*_extent(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    for i, (_, end, one) in enumerate(extents):
        for start, _, other in extents[i + 1 :]:
            if start >= end:
                break
            yield one, other


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses from the first byte to just past the last one."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
