"""Which sections can run B in two halves: found out on the job's own data, once.

The two halves compute the products that autograd would, so they should give its bits. A section where they do not,
whatever the reason (a stride, a kernel, an operation that draws without a seed), is never split: splitting may
change when gradients are computed, never what they are.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from varuna.engine.deferred import Pending, retarget
from varuna.partition.model import PartitionedModel
from varuna.partition.split import SectionGraph

Run = Callable[..., tuple[Tensor, ...]]


@dataclass
class Halves:
    """Retargeted sections of one model and what the check said, kept over generations."""

    _retargeted: dict[GraphModule, GraphModule | None] = field(default_factory=dict)
    _exact: dict[Hashable, bool] = field(default_factory=dict)

    def of(
        self,
        model: PartitionedModel,
        section: SectionGraph,
        arguments: Sequence[Any],
        seeded: Callable[[], AbstractContextManager[object]],
    ) -> Run | None:
        """The section's graph with ``Pending`` as a further first argument; None if it must run whole.

        The first micro-batch of a shape costs two runs more. Sections with equal code and shapes share a verdict.

        Args:
            model: for names and shapes of parameters; one declared length of it.
            section: one of the model's.
            arguments: of the section's own graph.
            seeded: in force while the section runs.
        """
        if section.module not in self._retargeted:
            self._retargeted[section.module] = retarget(section, model.trainable, model.shapes)
        module = self._retargeted[section.module]
        if module is None:
            return None
        key = (section.module.code, *(_kind(argument) for argument in arguments))
        if key not in self._exact:
            self._exact[key] = _agree(section.module.forward, module.forward, arguments, seeded)
        return module.forward if self._exact[key] else None


def _kind(argument: Any) -> Hashable:
    """What decides which kernels run on an argument."""
    if not isinstance(argument, Tensor):
        return type(argument).__name__
    return tuple(argument.shape), argument.stride(), argument.dtype, argument.device, argument.requires_grad


def _agree(
    whole: Run, halves: Run, arguments: Sequence[Any], seeded: Callable[[], AbstractContextManager[object]]
) -> bool:
    """Both give the same results, and the same gradients of all arguments, bit for bit."""
    expected = _outcome(lambda _pending, *given: whole(*given), arguments, seeded)
    try:
        found = _outcome(halves, arguments, seeded)
    except RuntimeError:  # such as an operation that refuses the output of a custom function
        return False
    return all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(expected, found, strict=True)
    )


def _outcome(
    run: Run, arguments: Sequence[Any], seeded: Callable[[], AbstractContextManager[object]]
) -> list[Tensor | None]:
    """Results, then gradients of the arguments, under varied gradients of the results."""
    fresh: dict[int, Any] = {}
    for argument in arguments:
        wants = isinstance(argument, Tensor) and argument.requires_grad
        fresh.setdefault(id(argument), argument.detach().requires_grad_() if wants else argument)
    given = [fresh[id(argument)] for argument in arguments]
    pending = Pending()
    with torch.enable_grad(), seeded():
        made = run(pending, *given)
    roots = [value for value in made if value.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_varied(value) for value in roots])
    pending.flush()
    gradients = [value.grad if isinstance(value, Tensor) and value.requires_grad else None for value in given]
    return [*(value.detach() for value in made), *gradients]


def _varied(value: Tensor) -> Tensor:
    """A gradient without structure that could hide a difference, the same at every call."""
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float64)
    return torch.sin(steps * 0.7 + 0.1).to(value.dtype).view(value.shape)
