"""Options of the script's optimizer for each group of parameters: all workers of a run must say the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varuna.engine.stage.optimizer import OptimizerFactory
from varuna.partition.model import PartitionedModel

_HOW = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options that say how the same numbers are computed: devices may differ in them."""


def optimizer_options(build: OptimizerFactory, model: PartitionedModel) -> str:
    """Options of all groups as JSON, as far as they are numbers or texts; empty where no optimizer can be built alone.

    Args:
        build: the script's, for parameters with their names.
        model: whose parameters it trains.
    """
    named = [
        (name, nn.Parameter(torch.empty(shape, device="meta")))
        for name, shape in model.shapes.items()
        if name in model.trainable
    ]
    try:
        built: Any = build(named)
        groups = [group for each in (built if isinstance(built, Sequence) else [built]) for group in each.param_groups]
    except Exception:  # noqa: BLE001 - code that needs values, or a device: a step will say what is wrong with it
        return ""
    return json.dumps([_plain(group) for group in groups])


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        known = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
        if key not in _HOW and _is_plain(known):
            found[key] = known
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
