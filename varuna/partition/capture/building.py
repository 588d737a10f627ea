"""Build a model without allocating it: parameters have shapes only, small known values stay real.

Constructors read values: the rates of stochastic depth come out of a ``linspace``, tables are computed and
kept as plain attributes. So what is small and follows from the code alone is computed for real, and all else
(uninitialised, random, large) lives on the meta device, as ``transformers`` builds its models itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from varuna.core.errors import ModelError
from varuna.data.randomness import generator_lock
from varuna.partition.capture.construction import construct, drawing
from varuna.partition.opaque.quantized import quantized_by_function, quantized_layers
from varuna.partition.watching.fake_mode import Copying
from varuna.partition.watching.user_caches import without_fakes

MOST_ELEMENTS = 1 << 20
"""Known values of up to this many elements are real."""


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes what is small and known; the rest goes to the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one op of the constructor."""
        given = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.is_meta for tensor in tensors) and not _is_unknown(func):
            return func(*args, **given)
        if not tensors and not _is_unknown(func):
            # without memory first: only what turns out small is computed
            shape = func(*args, **_on("meta", func, given))
            if not isinstance(shape, Tensor) or shape.numel() <= MOST_ELEMENTS:
                return func(*args, **_on("cpu", func, given))
            return shape
        args, given = tree_map_only(Tensor, _shape_of, (args, given))
        return func(*args, **_on("meta", func, given))


def _is_unknown(func: Any) -> bool:
    """Return whether the op makes new tensors whose values the code leaves open; one that writes in place does not."""
    name = func._schema.name.removeprefix("aten::")
    random = torch.Tag.nondeterministic_seeded in func.tags and not name.endswith("_")
    return random or name.startswith(("empty", "new_empty"))


def _on(device: str, func: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    return {**given, "device": torch.device(device)} if takes_device else dict(given)


def _shape_of(value: Tensor) -> Tensor:
    return value if value.is_meta else value.to("meta")


class BuiltModel(NamedTuple):
    """A module without data."""

    module: nn.Module
    buffers: dict[str, Tensor]
    """values that the constructor gives to buffers, where they are known and small"""


def build_without_data(build: Callable[[], nn.Module], mode: FakeTensorMode) -> BuiltModel:
    """Build the module in the modes that it was given, its parameters and buffers fakes of ``mode``.

    Raises:
        ModelError: ``build`` returned something else than a module.
        Exception: whatever ``build`` raises.
    """
    try:
        with without_fakes(), generator_lock, torch.random.fork_rng(devices=[]), drawing(), KnownValues():  # type: ignore[no-untyped-call]
            model = build()
        known = True
    except Exception:  # noqa: BLE001 - models that assign tensors across devices; the error of the second way is told
        with without_fakes(), generator_lock, drawing(), mode, Copying():
            model = build()
        known = False
    if not isinstance(model, nn.Module):
        raise ModelError(f"model= must build a torch.nn.Module, but returned {type(model).__name__}")
    if layers := quantized_layers(model):
        raise ModelError(quantized_by_function(layers))
    if lazy := uninitialised(model):
        raise ModelError(lazy)
    buffers: dict[str, Tensor] = {}
    if known:
        buffers = {name: value for name, value in model.named_buffers() if not value.is_meta}
        _to_fakes(model, mode)
    _fill_attributes(model, build)
    with mode:
        return BuiltModel(model, buffers)


def uninitialised(model: nn.Module) -> str:
    """Return what to do about layers that take their sizes from a first batch (``nn.LazyLinear``); empty: none is."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            return (
                f"{name} has no shape yet: its layer takes it from the first batch. Give the layer its sizes "
                "(nn.Linear(8, 16) in place of nn.LazyLinear(16)), or let the model run once on a batch of one sample "
                "before it is passed: with torch.no_grad(): model(...)"
            )
    return ""


def cast_fakes(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Do what ``model.to(dtype)`` does, for a module whose parameters and buffers are fakes of ``mode``."""
    made: dict[int, Tensor] = {}

    def fake(value: Tensor) -> Tensor:
        if id(value) not in made:
            with mode:
                new: Tensor = torch.empty_like(value, dtype=dtype)
            is_parameter = isinstance(value, nn.Parameter)
            made[id(value)] = nn.Parameter(new, requires_grad=value.requires_grad) if is_parameter else new
        return made[id(value)]

    originals = []  # kept alive, so that no identity is used twice
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None and value.is_floating_point():
                    originals.append(value)
                    table[name] = fake(value)  # type: ignore[assignment]


def _to_fakes(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace every parameter and buffer, the same one by the same fake, and unknown plain attributes."""
    made: dict[int, Tensor] = {}

    def fake(value: Tensor) -> Tensor:
        if id(value) not in made:
            with mode:
                new: Tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            if isinstance(value, nn.Parameter):
                new = nn.Parameter(new, requires_grad=value.requires_grad)
            made[id(value)] = new
        return made[id(value)]

    originals = []  # kept alive, so that no identity is used twice
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    originals.append(value)
                    table[name] = fake(value)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and (value.is_meta or id(value) in made):
                originals.append(value)
                object.__setattr__(module, name, fake(value))


def _fill_attributes(model: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Give plain tensor attributes values, such as a mask that begins as ``torch.empty`` and is then filled.

    Parameters begin so as well: only what happens to the memory later tells, so the constructor is recorded.
    """
    own = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
    missing = [
        (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, FakeTensor) and value.untyped_storage()._cdata not in own
    ]
    if not missing:
        return
    try:
        construction = construct(build, seed=0)
    except ModelError:  # then export says which it needs
        return
    for path, name in missing:
        value = construction.attribute(path, name)
        if value is not None:
            object.__setattr__(model.get_submodule(path), name, value)
