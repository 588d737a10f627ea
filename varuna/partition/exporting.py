"""torch.export, helped over what it cannot follow by itself.

Models ask whether they are being compiled, and then take other paths. Export tries that path first, since it avoids
branches on data; then the path of plain eager; last, with the first samples at hand, it takes branches on data as they
do. Such branches are kept as conditions (``conditions.py``), which every batch must meet.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace as _torch_trace

from varuna.core.errors import ModelError
from varuna.partition.branches import general_sizes
from varuna.partition.functions import kept_functions
from varuna.partition.loops import EveryPlace

_trace: Any = _torch_trace


class Exported(NamedTuple):
    """A program, and what export relied on."""

    program: torch.export.ExportedProgram
    visits_all: bool
    """loops over the places where a mask is true run for every place"""
    follows_samples: bool
    """branches on data went as for the first samples"""


def export(
    module: nn.Module,
    fake: Mapping[str, Tensor],
    samples: Mapping[str, Tensor],
    accept: Callable[[torch.export.ExportedProgram], bool],
) -> Exported:
    """Export for any batch size.

    Args:
        module: called with one dict of tensors.
        fake: a batch without data.
        samples: the same batch with data.
        accept: whether branches that follow the samples follow them alone.

    Raises:
        Exception: of the first way, if no way leads to a graph.
    """
    first: Exception | None = None
    for follows, as_eager in ((False, False), (False, True), (True, False), (True, True)):
        places = EveryPlace()
        asked = _as_eager() if as_eager else nullcontext()
        known = _with_samples(fake, samples) if follows else nullcontext()
        try:
            with asked, known, places, _silent(), _idle_moves():
                program = _attempt(module, fake)
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model's own code raises
            first = first or error
            continue
        if not follows or accept(program):
            return Exported(program, places.visited, follows)
    assert first is not None
    raise first


def _attempt(module: nn.Module, fake: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    def attempt(batch: Any) -> torch.export.ExportedProgram:
        dynamic = ({key: {0: batch} for key in fake},)
        with kept_functions(), general_sizes():
            return torch.export.export(module, (dict(fake),), strict=False, dynamic_shapes=dynamic)

    try:
        return attempt(torch.export.Dim("batch", min=1))
    except UserError as error:
        if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
            raise
        # true for any batch size, but more than export can prove (min(32, 512 * batch) == 32): let it not ask
        return attempt(torch.export.Dim.DYNAMIC)


@contextmanager
def _silent() -> Iterator[None]:
    """Export prints whole graphs of what it cannot follow; the error itself says which line."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    _trace.print = lambda *_, **__: None  # a name of that module only, in front of the built-in one
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s)The tensor attributes? .*_flat_weights")  # every LSTM's own list
            yield
    finally:
        del _trace.print
        logger.setLevel(level)


@contextmanager
def _idle_moves() -> Iterator[None]:
    """``module.to(dtype)`` within forward() leaves a module alone whose tensors have that dtype."""
    original = nn.Module._apply

    def apply(self: nn.Module, move: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if all((moved := move(each)).dtype == each.dtype and moved.device == each.device for each in tensors):
            return self
        return original(self, move, recurse)  # type: ignore[no-untyped-call, no-any-return]

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def _as_eager() -> Iterator[None]:
    """Models that ask are told that nothing is being compiled."""
    asked = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: False
    try:
        yield
    finally:
        torch.compiler.is_compiling = asked


@contextmanager
def _with_samples(fake: Mapping[str, Tensor], samples: Mapping[str, Tensor]) -> Iterator[None]:
    """What follows from the samples alone has values; parameters, and what follows from them, have none."""
    values = {id(value): samples[key].clone() for key, value in fake.items()}
    original = FakeTensorMode.from_tensor

    def from_tensor(self: FakeTensorMode, tensor: Tensor, **given: Any) -> Any:  # export makes all of them anew
        self.fake_tensor_converter.meta_converter.copy_data = False
        made: Any = original(self, tensor, **given)
        if id(tensor) in values:
            made.real_tensor = values[id(tensor)]
        return made

    FakeTensorMode.from_tensor = from_tensor  # type: ignore[method-assign]
    try:
        with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
            yield
    finally:
        FakeTensorMode.from_tensor = original  # type: ignore[method-assign]
