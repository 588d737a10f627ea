"""The operation that runs a module: its kernel on values, its shapes and bytes without them.

The kernel is composite, so autograd records what the module does, as in plain eager: its backward, and a second one
through it where the module computes gradients itself, need nothing of ours.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from varuna.core.errors import ModelError
from varuna.partition.opaque.autograd_functions import apply_of_torch
from varuna.partition.opaque.each_sample import spread
from varuna.partition.opaque.met import met
from varuna.partition.opaque.template import Marks, Template

NAMESPACE = "varuna_modules"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # lives as the process does
_CPU = torch.device("cpu")


class Given(NamedTuple):
    """Stands for a tensor among the arguments."""

    dtype: torch.dtype
    fixed: tuple[int, ...]
    """shape at 0 examples: each dimension is ``fixed + per_example * batch``"""
    per_example: tuple[int, ...]
    differentiable: bool
    """a gradient is wanted for it in training: in F, too, where the module may ask for it itself"""

    def shape(self, batch: int) -> list[int]:
        """Shape for ``batch`` examples."""
        return [base + slope * batch for base, slope in zip(self.fixed, self.per_example, strict=True)]


class Made(NamedTuple):
    """Stands for a tensor among the results."""

    dtype: torch.dtype
    fixed: tuple[int, ...]
    per_example: tuple[int, ...]

    def shape(self, batch: Any) -> list[Any]:
        """Shape for ``batch`` examples, a number or a symbol."""
        return [base + slope * batch for base, slope in zip(self.fixed, self.per_example, strict=True)]


class GrowingSize(NamedTuple):
    """A number that grows with the examples."""

    fixed: int
    per_example: int

    def at(self, batch: Any) -> Any:
        """The number for ``batch`` examples."""
        return self.fixed + self.per_example * batch


@dataclass(frozen=True)
class Learned:
    """Findings from real runs of a module."""

    results: TreeSpec
    leaves: tuple[Any, ...]
    """``Made`` for a tensor, else the constant"""
    forward_s: float
    """on the nominal device, for one example"""
    kept_bytes: GrowingSize
    """by autograd between forward and backward, beside the results"""
    passing_bytes: GrowingSize
    """while the backward runs, beside what was kept and the gradients"""
    scratch: frozenset[str]
    """attributes that a call writes and no other one reads"""

    @property
    def made(self) -> list[Made]:
        """The tensors among the results."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Made)]


class Lost:
    """Stands for a result that is neither a tensor nor a plain value: it may be passed on, but not used."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lost) and other._kind == self._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def __repr__(self) -> str:
        return f"a {self._kind}"

    def __getattr__(self, name: str) -> Any:
        raise ModelError(
            f"forward() reads {name} of a {self._kind}, which comes from a module that runs as written: only "
            "tensors and plain values are known outside of it. Return a tensor instead."
        )


class Ran(NamedTuple):
    """The outcome of one call of a module."""

    leaves: list[Any]
    """tensors, plain values, and what stands for others"""
    structure: TreeSpec
    written: dict[str, bool]
    """attributes that it wrote -> whether there was something before"""
    module: nn.Module
    """as it is now"""


@dataclass
class Call:
    """A module with everything that it is called with but tensors and symbolic sizes."""

    path: str
    template: Template
    arguments: TreeSpec
    """of ``(args, kwargs)``"""
    leaves: tuple[Any, ...]
    """``Given`` for a tensor, ``torch.SymInt`` (the class) for a size, else the constant"""
    learned: Learned | None = None

    def run(
        self,
        tensors: Sequence[Tensor],
        state: Sequence[Tensor],
        sizes: Sequence[int],
        module: nn.Module | None = None,
    ) -> Ran:
        """Call the module, or ``module``, which has been called before.

        Raises:
            WritesError: it wrote to its arguments.
        """
        keeps = torch.is_grad_enabled()
        kinds = [leaf for leaf in self.leaves if isinstance(leaf, Given)]
        given = [_argument(value, kind, keeps) for value, kind in zip(tensors, kinds, strict=True)]
        device = next((value.device for value in (*state, *tensors)), _CPU)
        args, kwargs = spread(tree_unflatten(_filled(self.leaves, given, sizes, device), self.arguments))
        versions = [value._version for value in given]
        with own_draws(), torch.enable_grad():  # as in plain training: paths of its own for inference stay untaken
            module = self.template.holding(state) if module is None else module
            marks = Marks(module)
            found, structure = tree_flatten(module(*args, **kwargs))
        if [value._version for value in given] != versions:
            raise WritesError(self.path, "its arguments in place")
        taken = {value.untyped_storage()._cdata for value in (*given, *state)}
        leaves = [_result(leaf, taken, keeps) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in found]
        return Ran(leaves, structure, marks.written(), module)

    def kernel(self, batch: int, tensors: list[Tensor], state: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Run the operation; return the tensors among the results."""
        assert self.learned is not None
        # without data, as in export and footprints: shapes and bytes that real runs have shown
        if any(isinstance(value, FakeTensor) for value in (*tensors, *state)):
            made = apply_of_torch(_Shaped, self.learned, batch, *tensors, *state)
            return list(made)
        found, structure, written, _ = self.run(tensors, state, sizes)
        for name in written.keys() - self.learned.scratch:
            raise WritesError(self.path, f"{self.path}.{name}")
        expected = self.learned.leaves
        alike = structure == self.learned.results and all(map(_alike, found, expected, [batch] * len(found)))
        if not alike:
            raise ModelError(
                f"{self.path} runs as written, as one operation, and gave {_shapes(found)} for {batch} examples "
                f"where {_shapes(expected, batch)} was expected: the shapes of its results depend on the data. "
                "Make it return the same shape for every batch (pad to a fixed size)."
            )
        return [leaf for leaf in found if isinstance(leaf, Tensor)]


class WritesError(ModelError):
    """A module that runs as written writes what it must not."""

    def __init__(self, path: str, what: str, why: str = "") -> None:
        self.path, self.what = path, what
        reason = f" ({why})" if why else ""
        super().__init__(
            f"{path} can only run as written, as one operation{reason}, and it writes {what}. Each micro-batch runs "
            "more than once (forward, recompute) and on any worker, so such a module must keep no state between calls. "
            "Return what it computes, or switch that feature off in the model's configuration."
        )


def _filled(leaves: Iterable[Any], tensors: Iterable[Tensor], sizes: Iterable[int], device: torch.device) -> list[Any]:
    values, numbers = iter(tensors), iter(sizes)
    return [
        next(values)
        if isinstance(leaf, Given)
        else next(numbers)
        if leaf is torch.SymInt
        else device
        if leaf == _CPU
        else leaf
        for leaf in leaves
    ]


def _argument(value: Tensor, kind: Given, keeps: bool) -> Tensor:
    """An argument with a gradient exactly where training has one; the batch itself is never marked as wanting one."""
    if value.requires_grad and keeps:
        return value
    alias = value.detach()
    return alias.requires_grad_() if kind.differentiable and not keeps else alias


def _result(value: Tensor, taken: set[int], keeps: bool) -> Tensor:
    """A result in memory of its own, and dense, as it is captured."""
    if not keeps:
        value = value.detach()
    dense = value.contiguous().resolve_conj().resolve_neg()
    return dense.clone() if dense.untyped_storage()._cdata in taken else dense


def _plain(leaf: Any) -> Any:
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype))
    return leaf if is_plain else Lost(type(leaf).__qualname__)


def _alike(found: Any, expected: Any, batch: int) -> bool:
    if isinstance(expected, Made):
        is_same = isinstance(found, Tensor) and found.dtype is expected.dtype
        return is_same and list(found.shape) == expected.shape(batch)
    return bool(type(found) is type(expected) and found == expected)


def _shapes(leaves: Iterable[Any], batch: int = 0) -> str:
    shown = [
        f"{str(leaf.dtype).removeprefix('torch.')}{leaf.shape(batch) if isinstance(leaf, Made) else list(leaf.shape)}"
        if isinstance(leaf, (Made, Tensor))
        else repr(leaf)
        for leaf in leaves
    ]
    return ", ".join(shown) or "nothing"


@contextmanager
def own_draws() -> Iterator[None]:
    """Start Python's, NumPy's and torch's generators from one number of torch's, which the section has seeded.

    All come back afterwards: whatever a module does to them is not seen by what comes next.
    """
    key = int(torch.randint(2**62, (), device="cpu"))
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        random.seed(key)
        # NumPy takes words of 32 bits
        np.random.seed((key & 0xFFFFFFFF, key >> 32))
        torch.default_generator.manual_seed(key)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_)


def name_of_kind(module: nn.Module) -> str:
    """Return a stand-in for the path of a module that ``forward`` makes, and that is no part of the model."""
    return f"{type(module).__module__}:{type(module).__qualname__}"


def is_kind(path: str) -> bool:
    """Return whether ``path`` is such a stand-in (``name_of_kind``), and not a path."""
    return ":" in path


@contextmanager
def drawing_as_operations(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Let modules of plain PyTorch draw as their operations do, so that both can be compared."""
    kinds = {path for path in paths if is_kind(path)}
    alone = {id(model.get_submodule(path)) for path in paths if path not in kinds}
    parts = {id(module) for module in model.modules()} if kinds else set()
    original = nn.Module._call_impl

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_alone = id(module) in alone or (kinds and id(module) not in parts and name_of_kind(module) in kinds)
        with own_draws() if is_alone else nullcontext():
            return original(module, *args, **kwargs)  # type: ignore[no-untyped-call]

    nn.Module._call_impl = call  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]


class _Shaped(torch.autograd.Function):
    """Results without values; keeps and needs the bytes that the module does."""

    @staticmethod
    def forward(ctx: Any, learned: Learned, batch: Any, *given: Tensor) -> tuple[Tensor, ...]:
        device = given[0].device
        made = tuple(torch.empty(kind.shape(batch), dtype=kind.dtype, device=device) for kind in learned.made)
        ctx.mark_non_differentiable(*(value for value in made if not _is_continuous(value.dtype)))
        ctx.save_for_backward(_bytes(learned.kept_bytes.at(batch), device))
        ctx.passing, ctx.shapes = learned.passing_bytes.at(batch), [(list(each.shape), each.dtype) for each in given]
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        device = gradients[0].device
        passing = _bytes(ctx.passing, device)
        wanted = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        found = [torch.empty(shape, dtype=dtype, device=device) if needs else None for (shape, dtype), needs in wanted]
        del passing
        return (None, None, *found)


def _bytes(count: Any, device: torch.device) -> Tensor:
    return torch.empty([count], dtype=torch.uint8, device=device)


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# -- operations, by name ---------------------------------------------------------------------------------------------

_calls: dict[str, Call] = {}


def operation_of(name: str) -> Any:
    """The operation of that name: ``(SymInt batch, Tensor[] tensors, Tensor[] state, SymInt[] sizes) -> Tensor[]``."""
    return getattr(getattr(torch.ops, NAMESPACE), name)


def known(name: str) -> Call | None:
    """The call that was registered under a name."""
    return _calls.get(name)


def register(name: str, call: Call) -> None:
    """Let an operation of that name run ``call``."""
    met()
    if name not in _calls:
        # torch keeps a kernel for good, so it looks its call up: a later capture may put another one there
        kernel = lambda batch, tensors, state, sizes: _calls[name].kernel(batch, tensors, state, sizes)  # noqa: E731
        _library.define(  # type: ignore[no-untyped-call]
            f"{name}(SymInt batch, Tensor[] tensors, Tensor[] state, SymInt[] sizes) -> Tensor[]"
        )
        _library.impl(name, kernel, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    _calls[name] = call


def call_of(target: object) -> Call | None:
    """The call that a node of a graph makes, if it runs a module."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace == NAMESPACE:
        return _calls[target._opname]
    return None


def holds_opaque(graph: Graph) -> bool:
    """Return whether a graph, or one of a region within it, runs a module eagerly."""
    owner = graph.owning_module
    for node in graph.nodes:
        if call_of(node.target) is not None:
            return True
        inner = getattr(owner, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, GraphModule) and holds_opaque(inner.graph):
            return True
    return False
