"""Memory of the user's optimizer, tried on fake tensors: bytes of its state, and of a step while it runs."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import optimizer as _torch_optimizer

from varuna.core.errors import ModelError, VarunaError
from varuna.partition.optimizers import (
    AveragingFactory,
    OptimizerFactory,
    build_optimizer,
    is_torchs,
)
from varuna.partition.watching.fake_mode import FakeMode
from varuna.partition.watching.live_bytes import Allocated

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_SUM, _MOST = 0.9, 1.2
"""A step that needs nearly what its sections need together, and plainly more than one of them, updates all at once."""


_CANNOT_BE_TRIED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    VarunaError,
)
"""Errors of code that reads values, or wants parameters that are not there: the same on every worker."""


_REMEMBERED = 64


class OptimizerNeeds(NamedTuple):
    """The optimizer step of a model."""

    state_bytes: Mapping[str, int]
    """by parameter"""
    step_bytes: tuple[int, ...]
    """by section: intermediate results of a step of its parameters alone"""
    together: bool
    """those of a stage's sections add up; else one parameter is updated after the other"""
    combines: bool
    """the optimizer may ask other stages, with ``all_reduce_shared``: it is not torch's own"""


class _Trial(NamedTuple):
    state_bytes: Mapping[str, int]
    step_bytes: int
    is_torchs: bool


_known: dict[tuple[int, bool, Shapes, bool], tuple[OptimizerFactory, _Trial | None]] = {}
"""Trials by factory, which is kept lest another takes its id: a model is captured again for other lengths."""


def try_update(
    factory: OptimizerFactory,
    shapes: Mapping[str, tuple[int, ...]],
    sections: Sequence[Collection[str]],
    *,
    on_cpu: bool,
) -> OptimizerNeeds:
    """Step the user's optimizer on fake parameters; where that fails, assume two fp32 copies and two results.

    Args:
        factory: the user's.
        shapes: of the trainable parameters.
        sections: names of those that each section uses.
        on_cpu: updates run on a CPU, where torch's own optimizers take parameters one by one, elsewhere together.
    """
    whole = _known_or_tried(factory, tuple(sorted(shapes.items())), on_cpu=on_cpu)
    if whole is None:
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        largest = tuple(8 * max((sizes[name] for name in names if name in sizes), default=0) for names in sections)
        return OptimizerNeeds({name: 8 * size for name, size in sizes.items()}, largest, together=False, combines=True)
    known: dict[tuple[tuple[int, ...], ...], int] = {}
    step_bytes = []
    for names in sections:
        own = tuple((name, shapes[name]) for name in sorted(names) if name in shapes)
        key = tuple(shape for _, shape in own)
        if key not in known:
            alone = _known_or_tried(factory, own, on_cpu=on_cpu)
            known[key] = whole.step_bytes if alone is None else alone.step_bytes
        step_bytes.append(known[key])
    most = max(step_bytes, default=0)
    together = whole.step_bytes > max(_SUM * sum(step_bytes), _MOST * most)
    if most and not together:  # the results of one parameter may live until the next one's take their place
        step_bytes = [-(-each * max(most, whole.step_bytes) // most) for each in step_bytes]
    return OptimizerNeeds(whole.state_bytes, tuple(step_bytes), together, combines=not whole.is_torchs or _is_hooked())


def _known_or_tried(factory: OptimizerFactory, shapes: Shapes, *, on_cpu: bool) -> _Trial | None:
    own, averages = (factory.factory, True) if isinstance(factory, AveragingFactory) else (factory, False)
    key = (id(own), averages, shapes, on_cpu)
    if key not in _known:
        tried = _try(factory, shapes, on_cpu=on_cpu)
        while len(_known) >= _REMEMBERED:
            _known.pop(next(iter(_known)))
        _known[key] = factory, tried
    return _known[key][1]


def _try(factory: OptimizerFactory, shapes: Shapes, *, on_cpu: bool) -> _Trial | None:
    """Run two steps, of which the second finds state; None if the optimizer refuses fake tensors, or some of them.

    Raises:
        ModelError: it fails for a reason that may be this machine's own: another worker would find other facts.
    """
    if not shapes:
        return _Trial({}, 0, is_torchs=True)
    counted = Allocated()
    with FakeMode():
        named = [(name, torch.nn.Parameter(torch.empty(shape))) for name, shape in shapes]
        for _, parameter in named:
            parameter.grad = torch.empty_like(parameter)
        try:
            built = build_optimizer(factory, named)
            if not on_cpu:
                _take_together(built)
            built.step()
            state = [value for entries in built.state.values() for value in entries.values()]
            known = (each for _, parameter in named for each in (parameter, parameter.grad))
            for tensor in (*known, *state):
                if isinstance(tensor, Tensor):
                    counted.add(tensor)
            before_bytes = counted.now_bytes
            with counted.watch():
                built.step()
        except _CANNOT_BE_TRIED as error:
            if "allocate memory" not in str(error):  # which torch says in a RuntimeError
                return None
            raise _not_here(error) from error
        except Exception as error:
            raise _not_here(error) from error
        state_bytes = {
            name: sum(v.numel() * v.element_size() for v in built.state[p].values() if isinstance(v, Tensor))
            for name, p in named
            if p in built.state
        }
    return _Trial(state_bytes, counted.peak_bytes - before_bytes, is_torchs(built))


def _not_here(error: Exception) -> ModelError:
    return ModelError(
        f"optimizer= failed on this machine when it was tried on parameters without data: {type(error).__name__}: "
        f"{error}. All workers must build the same optimizer: make available here what it needs (memory, files, "
        "packages), and start again."
    )


def _take_together(built: torch.optim.Optimizer) -> None:
    """Let torch's optimizers take parameters together, as on a GPU; fake parameters do not look like a GPU's."""
    for group in built.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _is_hooked() -> bool:
    """Return whether a hook of the user's runs at each step of any optimizer."""
    return any((_torch_optimizer._global_optimizer_pre_hooks, _torch_optimizer._global_optimizer_post_hooks))
