"""Before step 0: do functions of the user's that run once a step remember anything?

Workers come and go, and a step may be done again: what a function keeps from call to call in variables of its own is
then another worker's, or none. What ``state=`` names moves with the run, so it may change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.checks.drawn import drawn, small, tried
from varuna.core.errors import UsageError
from varuna.data.randomness import seeded
from varuna.engine.stage.optimizer import SchedulerFactory, StageOptimizer
from varuna.partition.after_step import AfterStep, Following, takes_step
from varuna.partition.graph.captured import TensorKind
from varuna.partition.object_copies import independent
from varuna.partition.watching.user_lines import at_place

_STEPS = 4


def check_after_step(function: AfterStep, following: Following, kept: Sequence[Any] = ()) -> None:
    """Compare two copies of ``after_step`` on the same tensors: one has been called before, the other has not.

    Args:
        function: the user's.
        following: of its dry run.
        kept: objects that ``state=`` names.

    Raises:
        UsageError: they make something else of the same tensors.
    """
    copies: dict[int, Any] = {}
    called = independent(function, copies)

    def differs() -> bool:
        _after(called, following, 0)
        fresh = independent(function, {id(each): copies[id(each)] for each in kept if id(each) in copies})
        # Both write what state= names, so the one that is compared must not have it from the other.
        second = independent(called)
        return not _same(_after(second, following, 1), _after(fresh, following, 1))

    if tried(differs):
        raise UsageError(
            f"after_step={at_place(function)} remembers something from call to call, so workers that come later, "
            "or that do a step again, would train otherwise. after_step(parameters, buffers, step) is told the number "
            "of the step. Counters and averages belong into buffers of the model (register_buffer), and numbers that "
            "the loop computes into a dict that state= names."
        )


def check_repeats(option: str, function: Callable[..., object], names: Iterable[str] | None = None) -> None:
    """Ask a function of the step twice for each of the first steps.

    Args:
        option: for the message.
        function: the user's.
        names: of parameters; None: it is a function of the step alone.

    Raises:
        UsageError: it gives other answers.
    """
    called, parameters = independent(function), [()] if names is None else [(name,) for name in names]
    asked = [(*each, step) for each in parameters for step in range(_STEPS)]
    if tried(lambda: any(called(*each) != called(*each) for each in asked)):
        raise UsageError(
            f"{option}{at_place(function)} gives another answer when it is asked again for the same step. Workers ask "
            "for themselves, and again when a step is repeated: let it follow from its arguments. To draw, use a "
            "generator that is seeded by the step: random.Random(step).choice(layers)."
        )


def check_schedule(factory: SchedulerFactory, build: Callable[[int], StageOptimizer]) -> None:
    """Compare a schedule with one that was built later and brought to the same step, as on a worker that joins.

    Args:
        factory: the user's.
        build: makes an optimizer whose schedule has followed so many steps.

    Raises:
        UsageError: they differ.
    """
    rates = tried(lambda: [[group.get("lr") for group in build(_STEPS).options() or ()] for _ in range(2)])
    if rates and rates[0] != rates[1]:
        raise UsageError(
            f"lr_scheduler={at_place(factory)} gives other rates when it is built again and brought to the same "
            f"step ({rates[0]} and {rates[1]} after {_STEPS}), as on a worker that joins: its function remembers "
            "something from call to call. Let the rate follow from the step that it is given."
        )


def _after(function: Callable[..., Any], following: Following, step: int) -> dict[str, Tensor]:
    with torch.no_grad(), seeded(0, "after_step check", step):
        parameters, buffers = (
            {name: _drawn(name, kind) for name, kind in kinds.items()}
            for kinds in (following.parameters, following.buffers)
        )
        function(parameters, buffers, *([step] if takes_step(function) else []))
    return {**parameters, **buffers}


def _drawn(name: str, kind: TensorKind) -> Tensor:
    shape = small(kind.shape)
    if not kind.dtype.is_floating_point:
        return torch.zeros(shape, dtype=kind.dtype)
    return drawn(name, shape).to(kind.dtype)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value.nan_to_num(), other[name].nan_to_num()) for name, value in one.items())
