"""Lists with an element for each sample, whose number nobody knows in a graph: one element stands for all.

``tensor.unbind()`` and ``list(tensor)`` give one ``AllSamples``. Whatever is done to it but to put it together with the
others, which are not there, is refused. A module that runs as written may be given such a list, also of dicts
(``[{"boxes": ..., "labels": ...}, ...]``, as detectors want them): its operation takes the whole tensors, and makes the
list of them again for as many samples as there are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

LOOPS = "forward() loops over the samples"
_CAT = (torch.cat, torch.concat, torch.concatenate)


class LoopsOverSamplesError(Exception):
    """A model computes something for each sample by itself, in a loop."""


class AllSamples:
    """Stands for every element of ``list(whole)``."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put the elements together; nothing else can be done to them."""
        given = dict(kwargs or {})
        listed = args[0] if args else given.pop("tensors", None)
        dim = args[1] if len(args) > 1 else given.pop("dim", 0)
        is_alone = isinstance(listed, (list, tuple)) and len(listed) == 1 and isinstance(listed[0], cls)
        if is_alone and dim == 0 and not given:
            whole: Tensor = listed[0]._whole
            if func is torch.stack:
                return whole
            if func in _CAT and whole.dim() > 1:
                return whole.flatten(0, 1)
        raise LoopsOverSamplesError(LOOPS)

    def __getattr__(self, name: str) -> NoReturn:
        raise LoopsOverSamplesError(LOOPS)


def number_listed(value: Sequence[Any]) -> Any:
    """How many samples a list has in which one element stands for all; None if it is another list."""
    first = value[0] if value else None
    if isinstance(first, dict):
        first = next(iter(first.values()), None)
    return first._whole.shape[0] if isinstance(first, AllSamples) else None


class _Listed:
    """Represents a list or a tuple with an element for each sample, in which whole tensors stand for theirs."""

    def __init__(self, element: Any, kind: type) -> None:
        self.element, self.kind = element, kind


register_pytree_node(
    _Listed,
    lambda listed: ([listed.element], listed.kind),
    lambda elements, kind: _Listed(next(iter(elements)), kind),
    serialized_type_name="varuna.partition.opaque.each_sample._Listed",
)


def gathered(tree: Any) -> Any:
    """Puts whole tensors in place of lists of their samples, in the arguments of a call."""
    return _changed(tree, _gathered)


def spread(tree: Any) -> Any:
    """Makes the arguments again that the call had, for as many samples as the tensors have."""
    return _changed(tree, _spread)


def _changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    found = change(tree)
    if found is not tree:
        return found
    if type(tree) in (list, tuple):
        return type(tree)(_changed(each, change) for each in tree)
    if type(tree) is dict:
        return {key: _changed(each, change) for key, each in tree.items()}
    return tree


def _gathered(tree: Any) -> Any:
    is_alone = type(tree) in (list, tuple) and len(tree) == 1
    leaves = tree_leaves(tree) if is_alone else []
    if leaves and all(isinstance(leaf, AllSamples) for leaf in leaves):
        return _Listed(tree_map(lambda leaf: leaf._whole, tree[0]), type(tree))
    return tree


def _spread(tree: Any) -> Any:
    if not isinstance(tree, _Listed):
        return tree
    samples = len(tree_leaves(tree.element)[0])
    return tree.kind(tree_map(lambda whole, i=i: whole[i], tree.element) for i in range(samples))
