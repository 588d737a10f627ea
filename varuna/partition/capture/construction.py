"""A model built under fake tensors, and the values that its constructor would have put into each tensor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from varuna.core.errors import ModelError, VarunaError
from varuna.data.randomness import seeded
from varuna.partition.capture.recording import Recorder, View
from varuna.partition.watching.fake_mode import Copying, FakeMode
from varuna.partition.watching.user_caches import without_fakes

_init: Any = nn.init


@dataclass(frozen=True)
class Construction:
    """Places of a model's parameters (by first name) and buffers, and the recorder that can fill them."""

    module: nn.Module
    """as built, without data"""
    recorder: Recorder
    parameters: dict[str, View]
    aliases: dict[str, str]
    """every further name of a tied parameter -> its first name"""
    buffers: dict[str, View]
    saved_buffers: frozenset[str]
    """buffers that belong to the model's ``state_dict``"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape."""
        return {name: view.size for name, view in self.parameters.items()}

    def parameter(self, name: str, seed: int) -> Tensor:
        """Values of one parameter, from a generator of its own."""
        return self.recorder.replay(self.parameters[name], seed, "parameter", name)

    def buffer(self, name: str, seed: int) -> Tensor:
        """Values of one buffer, as the constructor makes them; random ones from a generator of its own."""
        return self.recorder.replay(self.buffers[name], seed, "buffer", name)

    def attribute(self, module: str, name: str) -> Tensor | None:
        """Values of a tensor that a module holds as a plain attribute; None if it holds none, or random numbers."""
        value = getattr(self.module.get_submodule(module), name, None)
        view = self.recorder.view(value) if isinstance(value, Tensor) else None
        return None if view is None or self.recorder.draws(view) else self.recorder.replay(view)

    def is_random(self, buffer: str) -> bool:
        """Return whether a buffer's values depend on random numbers."""
        return bool(self.recorder.draws(self.buffers[buffer]))

    def check_independent(self) -> None:
        """Check that no two tensors of the model come from the same random numbers.

        Raises:
            ModelError: they do, so they cannot be drawn one by one; names both.
        """
        drawn_for: dict[int, str] = {}
        for name, view in {**self.parameters, **self.buffers}.items():
            for draw in self.recorder.draws(view):
                other = drawn_for.setdefault(draw, name)
                if other != name and {other, name} & self.parameters.keys():
                    raise ModelError(
                        f'init="per_parameter" draws every parameter separately, but the initial values of {name} '
                        f"depend on those of {other}. Initialise {name} on its own (with torch.nn.init), or use "
                        'init="constructor".'
                    )


def construct(build: Callable[[], nn.Module], seed: int) -> Construction:
    """Build the model under fake tensors and record the operations on each.

    Raises:
        ModelError: the model cannot be built so.
    """
    recorder = Recorder()
    mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with without_fakes(), seeded(seed), mode, drawing(recorder), idle_moves(), Copying(), recorder:
        try:
            model = build()
        except VarunaError:
            raise
        except Exception as error:
            raise ModelError(
                f"what model= does to its tensors cannot be recorded: {type(error).__name__}: {error}"
            ) from error
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return Construction(
        model,
        recorder,
        {name: recorder.view(value) for name, value in model.named_parameters()},
        {name: name_of_tensor for name, name_of_tensor in names.items() if name != name_of_tensor},
        {name: recorder.view(value) for name, value in buffers.items()},
        frozenset(buffers.keys() & model.state_dict(keep_vars=True).keys()),
    )


@contextmanager
def drawing(recorder: Recorder | None = None) -> Iterator[None]:
    """Let ``nn.init.trunc_normal_`` pass under fake tensors: it loops until all values are in range.

    The caller holds the generator lock while it builds, so that no other thread initialises a model meanwhile.
    """
    original = getattr(_init, "_no_grad_trunc_normal_", None)

    def draw(tensor: Tensor, *bounds: float, generator: torch.Generator | None = None) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():  # such as one that knows no random numbers
                return original(tensor, *bounds, generator=generator)  # type: ignore[misc, no-any-return]
        if recorder is not None:
            recorder.note_draw(original, tensor, *bounds)  # type: ignore[arg-type]
        return tensor

    if original is None:
        yield
        return
    _init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        _init._no_grad_trunc_normal_ = original


@contextmanager
def idle_moves() -> Iterator[None]:
    """Let ``module.to(...)`` leave a module alone whose tensors are as they should become.

    Otherwise torch swaps each tensor for a new one, which it cannot while something watches them.
    """
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
