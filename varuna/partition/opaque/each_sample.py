"""Lists with an element for each sample, whose number a graph leaves open: two elements stand for all.

``tensor.unbind()`` and ``list(tensor)`` give one for the first sample and one for any other. A few operations on an
element are done for all samples at once: another shape, a part of it, what goes element by element. Put together again,
the two must have come about in the same way, and neither from the other: then the loop does for each sample by itself
what it does for these. A loop that carries something from one sample to the next, counts the samples, writes to them
or does something else with them is refused.

A module that runs as written may be given such a list, also of dicts (``[{"boxes": ..., "labels": ...}, ...]``, as
detectors want them): its operation takes the whole tensors, and makes the list of them again for as many samples as
there are.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

LOOPS = "forward() loops over the samples"
_CAT = (torch.cat, torch.concat, torch.concatenate)
_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "getitem")
_REFUSED = (
    *("setitem", "iadd", "isub", "imul", "itruediv", "ipow"),  # writes to the whole, as an element is a view of it
    *("bool", "int", "float", "index", "iter", "contains", "array"),
)
_SHAPES = (Tensor.reshape, Tensor.view, torch.reshape)
_EACH_ELEMENT = (
    *(getattr(Tensor, f"__{name}__") for name in _OPERATORS if name != "getitem"),
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.long, Tensor.int, Tensor.bool, Tensor.to),
    *(Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.sigmoid, Tensor.tanh, Tensor.relu, Tensor.exp, Tensor.log),
    *(torch.sigmoid, torch.tanh, torch.relu, torch.exp, torch.log, torch.add, torch.sub, torch.mul, torch.div),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div),
)
_SCALARS = (int, float, bool, torch.dtype)
_roots = itertools.count()


class LoopsOverSamplesError(Exception):
    """A model does something with its samples one by one that cannot be done for all at once."""


class AllSamples:
    """Stands for the first element of ``list(whole)``, or for all others."""

    def __init__(self, whole: Tensor, turn: int, made: tuple[int, ...], ways: dict[Any, int]) -> None:
        """Prepare.

        Args:
            whole: of all samples.
            turn: 0 for the first, 1 for the others.
            made: how it came about: the same in both turns.
            ways: how others came about from the same list -> number.
        """
        self._whole, self._turn, self._made, self._ways = whole, turn, made, ways

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put elements together, or compute something from one."""
        given = dict(kwargs or {})
        if func is torch.stack or func in _CAT:
            rest = {**dict(zip(("tensors", "dim"), args, strict=False)), **given}
            whole = whole_of(rest.pop("tensors", None))
            if whole is not None and rest.pop("dim", 0) == 0 and not rest:
                if func is torch.stack:
                    return whole
                if whole.dim() > 1:
                    return whole.flatten(0, 1)
        return _computed(func, args, given)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_cuda", "layout"):
            return getattr(self._whole, name)
        if name == "ndim":
            return self._whole.dim() - 1
        method = getattr(Tensor, name, None)
        if not callable(method):
            raise LoopsOverSamplesError(LOOPS)
        return lambda *args, **kwargs: _computed(method, (self, *args), kwargs)

    @property
    def shape(self) -> torch.Size:
        """Shape of one sample."""
        return self._whole.shape[1:]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of one sample, or its size along ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions of one sample."""
        return self._whole.dim() - 1

    def item(self) -> "EachNumber":
        """Return what stands for a number of each sample."""
        return EachNumber(self)

    def __len__(self) -> Any:
        return self.shape[0]


class EachNumber:
    """Stands for a number of each sample: it may tell how many parts of another tensor belong to it."""

    def __init__(self, element: AllSamples) -> None:
        self.element = element


def _refuse(*_: Any) -> NoReturn:
    raise LoopsOverSamplesError(LOOPS)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)
    return lambda *args: _computed(method, args, {})


for _name in _OPERATORS:
    setattr(AllSamples, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _REFUSED:
    setattr(AllSamples, f"__{_name}__", _refuse)


class _Is:
    """A tensor, equal to itself only."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and other._tensor is self._tensor

    def __hash__(self) -> int:
        return id(self._tensor)


def listed(whole: Tensor) -> tuple[AllSamples, AllSamples]:
    """Return two elements that stand for the samples of a tensor."""
    made, ways = (next(_roots), 0), dict[Any, int]()
    return AllSamples(whole, 0, made, ways), AllSamples(whole, 1, made, ways)


def whole_of(elements: Any) -> Tensor | None:
    """The tensor of whose samples a list consists; None if it is another list.

    Raises:
        LoopsOverSamplesError: the first sample has come about in another way than the others.
    """
    if type(elements) not in (list, tuple) or not all(isinstance(each, AllSamples) for each in elements):
        return None
    if [each._turn for each in elements] != [0, 1]:
        return None
    first, other = elements
    if first._made != other._made:
        raise LoopsOverSamplesError(LOOPS)
    whole: Tensor = first._whole
    return whole


def counts_of(numbers: Any) -> Tensor | None:
    """The vector whose elements a list of numbers has; None if it is another list."""
    is_one = type(numbers) in (list, tuple) and all(isinstance(each, EachNumber) for each in numbers)
    return whole_of([each.element for each in numbers]) if is_one else None


def _computed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "AllSamples":
    """Do the same operation on all samples, for each by itself.

    Raises:
        LoopsOverSamplesError: it is none of those that are known, or takes something from another sample.
    """
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    elements = [leaf for leaf in leaves if isinstance(leaf, AllSamples)]
    first = elements[0]
    if len({each._turn for each in elements}) != 1:
        raise LoopsOverSamplesError(LOOPS)
    whole = _for_all(func, args, kwargs, first)
    ways, root = first._ways, first._made[0]
    # in either turn, the same operation on the same things has one number: whole_of compares these
    number = ways.setdefault((func, *map(_told, leaves)), len(ways) + 1)
    return AllSamples(whole, first._turn, (root, number), ways)


def _for_all(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], first: "AllSamples") -> Tensor:
    """Do the operation on whole tensors; ``torch.vmap`` would leave its traces in a graph."""
    samples, dims = first._whole.shape[0], first._whole.dim()
    if func in _SHAPES and not kwargs:
        shape = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return first._whole.reshape(samples, *shape)
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if all(each is None or each is Ellipsis or isinstance(each, (int, slice)) for each in index):
            return first._whole[(slice(None), *index)]
    is_plain = all(
        each._whole.dim() == dims if isinstance(each, AllSamples) else type(each) in _SCALARS for each in args
    )
    if func in _EACH_ELEMENT and is_plain and not kwargs:
        made: Tensor = func(*[each._whole if isinstance(each, AllSamples) else each for each in args])
        return made
    raise LoopsOverSamplesError(LOOPS)


def _told(leaf: Any) -> Any:
    """Return a key that tells an argument from others."""
    if isinstance(leaf, AllSamples):
        return leaf._made
    return _Is(leaf) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))


def number_listed(value: Sequence[Any]) -> Any:
    """Return the number of samples of a list in which elements stand for all; None if it is another list."""
    first = value[0] if value else None
    if isinstance(first, dict):
        first = next(iter(first.values()), None)
    if not isinstance(first, AllSamples) or not value[1:] or value[2:]:  # ``len`` itself asks
        return None
    return first._whole.shape[0]


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
    """Put whole tensors in place of lists of their samples, in the arguments of a call."""
    return _changed(tree, _gathered)


def spread(tree: Any) -> Any:
    """Make the arguments again that the call had, for as many samples as the tensors have."""
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
    if type(tree) not in (list, tuple) or len(tree) != 2:
        return tree
    (first, structure), (other, same) = map(tree_flatten, tree)
    if not first or not all(isinstance(leaf, AllSamples) for leaf in (*first, *other)) or structure != same:
        return tree
    wholes = [whole_of([one, two]) for one, two in zip(first, other, strict=True)]
    is_all = all(whole is not None for whole in wholes)
    return _Listed(tree_unflatten(wholes, structure), type(tree)) if is_all else tree


def _spread(tree: Any) -> Any:
    if not isinstance(tree, _Listed):
        return tree
    samples = len(tree_leaves(tree.element)[0])
    return tree.kind(tree_map(lambda whole, i=i: whole[i], tree.element) for i in range(samples))
