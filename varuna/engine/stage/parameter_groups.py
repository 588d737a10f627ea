"""The parameter groups of the whole model, so that a stage's optimizer has them all.

An optimizer's factory may leave out groups that are empty on a stage. A scheduler with a value for each group would
then fail there, or take one group for another. The training loop may write options of groups between steps; what it has
told the optimizer and its scheduler is told again to those of a new plan.
"""

import copy
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn

from varuna.checkpoint.io.section_state import JSON
from varuna.checkpoint.io.user_values import as_json, from_json
from varuna.partition.optimizers import OptimizerFactory, build_optimizer

Writes = Mapping[tuple[int, str], Any]
"""By number of a parameter group and name of an option: its value."""


class Written:
    """Options of parameter groups that the loop has written, with all values as they were after the newest write.

    A scheduler may change them with each step that follows, as it would in a plain loop.
    """

    def __init__(self, steps: int, measured: int, values: Writes) -> None:
        """Remember ``values``.

        Args:
            steps: optimizer steps that were made before.
            measured: how many values the scheduler had been told before.
            values: by group and option.
        """
        self.steps, self.measured, self.values = steps, measured, dict(values)

    @cached_property
    def mark(self) -> float:
        """Number that tells one such value from another; a thousand ranks' add up exactly."""
        return float(zlib.crc32(json.dumps(self.as_json(), sort_keys=True).encode()))

    def as_json(self) -> JSON:
        """Return it for checkpoints, and for workers that join."""
        listed = [[group, key, value] for (group, key), value in sorted(self.values.items())]
        return [self.steps, self.measured, as_json(listed, "an option of the optimizer")]

    @classmethod
    def from_json(cls, value: JSON) -> Self:
        """Read what ``as_json`` made."""
        steps, measured, listed = cast(list[Any], value)
        return cls(steps, measured, {(group, key): found for group, key, found in from_json(listed)})

    def __str__(self) -> str:
        return ", ".join(f"group {group}: {key}={value}" for (group, key), value in sorted(self.values.items()))


class Steering(NamedTuple):
    """Values that the loop has told the optimizer and its scheduler."""

    measured: tuple[float, ...] = ()
    """to a scheduler that waits for measurements"""
    written: Written | None = None

    @property
    def is_none(self) -> bool:
        """Return whether it has told nothing."""
        return not self.measured and self.written is None


NO_STEERING = Steering()


class ParameterGroup(NamedTuple):
    """A group of the optimizer over the whole model."""

    names: frozenset[str]
    options: Mapping[str, Any]
    """learning rate and whatever else is not the parameters"""


def whole_groups(factory: OptimizerFactory, shapes: Mapping[str, Sequence[int]]) -> tuple[ParameterGroup, ...]:
    """Find the groups of an optimizer over all parameters, which have no values here; () if the factory wants some.

    Args:
        factory: the user's.
        shapes: of all trainable parameters, in the model's order.
    """
    named = [(name, nn.Parameter(torch.empty(tuple(shape), device="meta"))) for name, shape in shapes.items()]
    names = {id(parameter): name for name, parameter in named}
    try:
        groups = build_optimizer(factory, named).param_groups
        return tuple(
            ParameterGroup(
                frozenset(names[id(parameter)] for parameter in group["params"]),
                {key: value for key, value in group.items() if key != "params"},
            )
            for group in groups
        )
    except Exception:  # noqa: BLE001 - any factory may want values; then the stage's groups stay as they are
        return ()


def complete(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]], whole: Sequence[ParameterGroup]
) -> None:
    """Give ``optimizer``, over some of the parameters, the groups that it lacks: empty ones, in their places.

    Nothing is done if its groups are not parts of the whole's, in the same order.
    """
    names = {id(parameter): name for name, parameter in named}
    own: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        mine = {names[id(parameter)] for parameter in group["params"]}
        # Groups keep their order, so each is looked for behind the one before; an empty one fits where no name is here.
        later = range(max(own, default=-1) + 1, len(whole))
        fitting = (i for i in later if mine <= whole[i].names and (mine or whole[i].names.isdisjoint(names.values())))
        place = next(fitting, None)
        if place is None:
            return
        own[place] = group
    optimizer.param_groups[:] = [
        own[i] if i in own else {"params": [], **copy.deepcopy(dict(each.options))} for i, each in enumerate(whole)
    ]


def options_alone(whole: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
    """Make an optimizer with the groups of the whole model and no parameters, where a stage has nothing to train."""
    made = torch.optim.Optimizer([{"params": [], **copy.deepcopy(dict(each.options))} for each in whole], {})
    vars(made)["_opt_called"] = True  # it makes no steps, and a scheduler would warn that it comes before them
    return made
