"""Facts that only real runs of a module tell: shapes of its results for any batch, its work, bytes that it keeps.

A module runs alone, on the CPU, at two batch sizes: with its initial parameters, with arguments that follow from the
samples as they are, and with random numbers in place of activations. The kernel compares what it gets later with what
was learned here, so a wrong guess is refused, never used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_leaves
from torch.utils.flop_counter import flop_registry

from varuna.data.randomness import seeded
from varuna.partition.opaque.autograd_functions import plain_functions
from varuna.partition.opaque.calls import Call, Given, GrowingSize, Learned, Made, Ran, WritesError
from varuna.partition.opaque.template import UnfitError
from varuna.partition.watching.live_bytes import Allocated

SIZES = (2, 3)
"""Examples in the two runs; as many samples as in the larger one are read."""
_BYTES_PER_FLOP = 0.9e12 / 15e12
"""Rate of the nominal device; see ``partition.graph.costs``."""
_BYTES_PER_S = 0.9e12

_torch: Any = torch
engine_of_torch = _torch.autograd._engine_run_backward
"""torch's function that computes gradients, however it is called."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of the runs."""

    tensors: tuple[Tensor | None, ...]
    """values for ``SIZES[-1]`` examples; None where they are unknown"""
    sizes: tuple[GrowingSize, ...]
    state: tuple[Tensor, ...]
    draw: Callable[[list[int]], Tensor] = torch.randn
    """in place of activations"""


class _Run(NamedTuple):
    leaves: list[Any]
    structure: TreeSpec
    work_s: float
    kept_bytes: int
    passing_bytes: int


def learn_module(call: Call, arguments: Arguments) -> Learned:
    """Run the module.

    Raises:
        UnfitError: it does not run, or its results are not what an operation can return.
        WritesError: it writes its arguments, or keeps something.
    """
    small, large, again, scratch = _runs(call, arguments)
    if small.structure != large.structure:
        raise UnfitError("the structure of its results changes with the number of samples")
    if not all(map(_same, large.leaves, again.leaves)):
        raise UnfitError("it gives different results for the same values and seeds")
    leaves = tuple(map(_made, small.leaves, large.leaves))
    if not any(isinstance(leaf, Made) for leaf in leaves):
        raise UnfitError("it returns no tensor")
    return Learned(
        results=large.structure,
        leaves=leaves,
        forward_s=float(f"{large.work_s / SIZES[-1]:.2g}"),
        kept_bytes=_line(small.kept_bytes, large.kept_bytes),
        passing_bytes=_line(small.passing_bytes, large.passing_bytes),
        scratch=scratch,
    )


def _runs(call: Call, arguments: Arguments) -> tuple["_Run", "_Run", Ran, frozenset[str]]:
    """Run both sizes, and the larger once more; return the three runs, and what is scratch."""
    failure: Exception | None = None
    for draw in (torch.randn, torch.rand):  # it may want what a sigmoid or a softmax gives: sizes of boxes
        given = replace(arguments, draw=draw)
        try:
            with plainly():
                small, large = (_measured(call, given, size) for size in SIZES)
                again = _once(call, given, SIZES[-1])
                return small, large, again, _scratch(call, given, small.leaves, again)
        except (UnfitError, WritesError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the module's own code raises
            failure = failure or error
    raise UnfitError(f"{type(failure).__name__}: {failure}") from failure


@contextmanager
def plainly() -> Iterator[None]:
    """Run normally in the middle of a capture."""
    compiler = _torch.compiler
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    engine = _torch.autograd._engine_run_backward
    try:
        compiler._is_compiling_flag = compiler._is_exporting_flag = False
        _torch.autograd._engine_run_backward = engine_of_torch
        with plain_functions(), _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        _torch.autograd._engine_run_backward = engine
        compiler._is_compiling_flag, compiler._is_exporting_flag = flags


def _measured(call: Call, arguments: Arguments, size: int) -> _Run:
    work, counted = _Work(), Allocated()
    with seeded(0, call.path, "arguments"):
        given, state, sizes = _given(call, arguments, size)
    # as in _once: results of runs are compared, so both must draw the same
    with seeded(0, call.path), counted.watch():
        with work:
            leaves, structure, *_ = call.run(given, state, sizes)
        after_bytes, made = counted.now_bytes, [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        counted.restart()
        wanted = [value for value in (*given, *state) if value.requires_grad]
        roots = [value for value in made if value.requires_grad]
        found: Iterable[Tensor | None] = ()
        if roots and wanted:
            ones = [torch.ones_like(value) for value in roots]
            found = torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        # without gradients of results, as large as these, and of arguments: the section counts them
        passing_bytes = counted.peak_bytes - after_bytes - _size_bytes(made) - _size_bytes(found)
    kept_bytes = after_bytes - _size_bytes(made)
    plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _Run(plain, structure, work.seconds, max(0, kept_bytes), max(0, passing_bytes))


def _once(call: Call, arguments: Arguments, size: int, module: nn.Module | None = None) -> Ran:
    with seeded(0, call.path, "arguments"):
        given, state, sizes = _given(call, arguments, size)
    with seeded(0, call.path):
        return call.run(given, state, sizes, module)


def _scratch(call: Call, arguments: Arguments, fresh: list[Any], ran: Ran) -> frozenset[str]:
    """Return what a call wrote, if that is mere scratch: it was empty before, and a later call does not read it.

    Args:
        call: of the module.
        arguments: of its runs.
        fresh: what another call gives, on other values, of a module that was never called.
        ran: a call.

    Raises:
        WritesError: it is more than that.
    """
    kept = [name for name, was_something in ran.written.items() if was_something]
    if not kept and ran.written:
        again = _once(call, arguments, SIZES[0], ran.module)
        if not all(map(_same, fresh, again.leaves)):
            kept = list(ran.written)
    if kept:
        raise WritesError(call.path, f"{call.path}.{kept[0]}")
    return frozenset(ran.written)


def _given(call: Call, arguments: Arguments, size: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
    kinds = [leaf for leaf in call.leaves if isinstance(leaf, Given)]
    given = [_value(kind, known, size, arguments.draw) for kind, known in zip(kinds, arguments.tensors, strict=True)]
    state = [value.detach().requires_grad_(value.requires_grad) for value in arguments.state]
    return given, state, [line.at(size) for line in arguments.sizes]


def _value(kind: Given, known: Tensor | None, size: int, draw: Callable[[list[int]], Tensor]) -> Tensor:
    shape = kind.shape(size)
    if known is None:
        value = draw(shape).to(kind.dtype) if kind.dtype.is_floating_point or kind.dtype.is_complex else None
        value = torch.zeros(shape, dtype=kind.dtype) if value is None else value
    else:
        value = known.detach()  # of SIZES[-1] examples; the smaller run takes the first of them
        for dimension, length in enumerate(shape):
            value = value.narrow(dimension, 0, length)
        value = value.clone(memory_format=torch.contiguous_format)
    return value.requires_grad_() if kind.differentiable else value


def _made(small: Any, large: Any) -> Any:
    """A result of the operation, from those of two runs."""
    if not isinstance(large, Tensor):
        if small != large:
            raise UnfitError(f"it returns {large!r} for one number of samples, {small!r} for another")
        return large
    if type(large) not in (Tensor, torch.nn.Parameter) or large.layout is not torch.strided:
        raise UnfitError("it returns something other than plain tensors")
    if not isinstance(small, Tensor) or small.dim() != large.dim() or small.dtype is not large.dtype:
        raise UnfitError("the number of dimensions of its results changes with the number of samples")
    slopes = tuple(b - a for a, b in zip(small.shape, large.shape, strict=True))
    fixed = tuple(a - SIZES[0] * slope for a, slope in zip(small.shape, slopes, strict=True))
    if any(base < 0 for base in fixed):
        raise UnfitError("the shape of its result does not follow from the number of samples")
    return Made(large.dtype, fixed, slopes)


def _line(small: int, large: int) -> GrowingSize:
    slope = max(0, large - small) // (SIZES[1] - SIZES[0])
    return GrowingSize(max(0, large - slope * SIZES[1]), slope)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(one == other)


def _size_bytes(values: Iterable[Tensor | None]) -> int:
    return sum(value.numel() * value.element_size() for value in values if value is not None)


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds on the nominal device: of each op the slower of its FLOPs and its bytes, as for ops of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one op."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count is not None else 0
            moved = _size_bytes(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
            self.seconds += max(flops * _BYTES_PER_FLOP, moved) / _BYTES_PER_S
        return result


def with_learned(call: Call, arguments: Arguments) -> Call:
    """The call, with what its runs have shown."""
    return replace(call, learned=learn_module(call, arguments))
