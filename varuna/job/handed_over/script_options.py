"""Options that the script writes into its own optimizer's groups are taken over by those that train.

The script's groups always show what the next step will use, also what a scheduler has made of it. So
``group["lr"] *= 0.5`` means what it means in a plain loop.
"""

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varuna.core.errors import UsageError
from varuna.engine.stage.parameter_groups import Writes
from varuna.job.handed_over.marks import shown

_TAKEN = (bool, int, float, str, type(None))
_REMEMBERED = 10_000
"""Turns of the script; a run goes back to its newest checkpoint."""
_NEAR = 1e-4
"""Relative; a loss that another plan has computed differs by rounding."""


class ScriptOptions:
    """The groups of an optimizer that the script has built."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to watch them."""
        self._optimizer = optimizer
        self._shown: list[dict[str, Any]] = []
        self._listed: list[list[Any]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._turns: dict[int, Writes] = {}
        """by step, what the script wrote after it"""
        self._next = 0
        """the step after the newest turn"""
        self.remember()

    def remember(self) -> None:
        """Remember how they are now."""
        groups = self._optimizer.param_groups
        self._shown, self._listed = [dict(group) for group in groups], [list(group["params"]) for group in groups]
        found = (value for group in groups for value in group.values() if isinstance(value, Tensor))
        self._tensors = [(value, value._version) for value in found]

    def show_options(self, options: Sequence[Mapping[str, Any]] | None) -> None:
        """Let the script's groups have these options."""
        if options is None or len(options) != len(self._optimizer.param_groups):
            return
        is_new = False
        for group, now in zip(self._optimizer.param_groups, options, strict=True):
            for key, value in now.items():
                if key != "params" and (key not in group or not _equal(group[key], value)):
                    group[key], is_new = copy.deepcopy(value), True
        if is_new:
            self.remember()

    def written_after(self, step: int) -> Writes:
        """Options that the script has written in its turn after ``step``.

        Raises:
            UsageError: it has changed something else in them; or the run has gone back and repeats the step, and the
                script writes something else than the first time.
        """
        found = self.written()
        if step < self._next:
            self._check_repeated(step, found)
        self._next = max(self._next, step + 1)
        if found:
            self._turns[step] = found
            while len(self._turns) > _REMEMBERED:
                self._turns.pop(next(iter(self._turns)))
        return found

    def _check_repeated(self, step: int, found: Writes) -> None:
        if len(self._turns) == _REMEMBERED and step < min(self._turns):
            return  # forgotten
        before = self._turns.get(step, {})
        for number, key in {**before, **found}:
            first, now = before.get((number, key), "nothing"), _plain(self._optimizer.param_groups[number].get(key))
            if not _equal(first, now) and not _is_near(first, now):
                raise UsageError(
                    f"the run has gone back to an earlier step, and repeats it. After step {step} the loop has "
                    f"now written {key}={shown(now)} into param_groups[{number}], and {shown(first)} the first time. "
                    "What it follows from (a count, a best loss) has not gone back. Keep it in a dict that state= "
                    'names: Trainer(..., state={"best": best}), with best["loss"] = ... in the loop.'
                )

    def written(self) -> Writes:
        """Options that the script has written since.

        Raises:
            UsageError: it has changed something else in them.
        """
        groups = self._optimizer.param_groups
        # most turns write nothing: one comparison tells
        if _same(groups, self._shown) and all(each._version == version for each, version in self._tensors):
            self._check_parameters()
            return {}
        self._check_parameters()
        found = {
            (number, key): _plain(value)
            for number, (group, before) in enumerate(zip(groups, self._shown, strict=True))
            for key, value in group.items()
            if key != "params" and (key not in before or not _equal(before[key], value) or self._is_touched(value))
        }
        for (number, key), value in found.items():
            if not _is_plain(value):
                raise UsageError(
                    f"the script wrote {shown(value)} into option {key!r} of param_groups[{number}] of its optimizer. "
                    "Options that the loop writes are taken over by all workers if they are numbers, texts, None, "
                    "tensors of one element, or tuples or lists of these."
                )
        for number, (group, before) in enumerate(zip(groups, self._shown, strict=True)):
            if gone := before.keys() - group.keys():
                raise UsageError(
                    f"the script removed option {gone.pop()!r} from param_groups[{number}] of its optimizer"
                )
        self.remember()
        return {place: copy.deepcopy(value) for place, value in found.items()}

    def _check_parameters(self) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._listed):
            raise UsageError(
                f"the script's optimizer has {len(groups)} parameter groups, and had {len(self._listed)} when "
                "trainer.steps(n) began: groups cannot be added in the loop. Give the optimizer all groups from the "
                "beginning, and pass frozen=, a function of a parameter's name and the step that is True until it "
                "begins."
            )
        for number, (group, before) in enumerate(zip(groups, self._listed, strict=True)):
            if len(group["params"]) != len(before) or not all(map(operator.is_, group["params"], before)):
                raise UsageError(
                    f"the script changed which parameters are in param_groups[{number}] of its optimizer. They are "
                    "decided before step 0: build the groups as they shall be in the end, and write their options in "
                    "the loop."
                )

    def _is_touched(self, value: Any) -> bool:
        return any(each is value and each._version != version for each, version in self._tensors)


def _equal(one: Any, two: Any) -> bool:
    if one is two:
        return True
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


def _same(groups: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> bool:
    try:
        return bool(groups == before)
    except Exception:  # noqa: BLE001 - tensors that differ
        return False


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_near(one: Any, two: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(two, int | float)
    return bool(numbers and abs(one - two) <= _NEAR * max(abs(one), abs(two)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _TAKEN) or (isinstance(value, Tensor) and value.numel() == 1)
