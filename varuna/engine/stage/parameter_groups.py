"""The parameter groups of the whole model, so that a stage's optimizer has them all.

An optimizer's factory may leave out groups that are empty on a stage. A scheduler with a value for each group would
then fail there, or take one group for another.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from varuna.partition.optimizers import OptimizerFactory, build_optimizer


class ParameterGroup(NamedTuple):
    """One group of the optimizer over the whole model."""

    names: frozenset[str]
    options: Mapping[str, Any]
    """learning rate and whatever else is not the parameters"""


def whole_groups(factory: OptimizerFactory, shapes: Mapping[str, Sequence[int]]) -> tuple[ParameterGroup, ...]:
    """Groups of an optimizer over all parameters, which have no values here; () if the factory wants some.

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
        later = range(max(own, default=-1) + 1, len(whole))
        fitting = (i for i in later if mine <= whole[i].names and (mine or whole[i].names.isdisjoint(names.values())))
        place = next(fitting, None)
        if place is None:
            return
        own[place] = group
    optimizer.param_groups[:] = [
        own[i] if i in own else {"params": [], **copy.deepcopy(dict(each.options))} for i, each in enumerate(whole)
    ]
