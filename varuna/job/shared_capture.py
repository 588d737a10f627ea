"""One capture for all workers that are threads of one process and were given the same model: see ``varuna.testing``."""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from varuna.job.model_config import Configured
from varuna.membership.launched import here
from varuna.partition.model import PartitionedModel

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def captured_once(given: object, built: Configured, capture: Callable[[], PartitionedModel]) -> PartitionedModel:
    """What ``capture`` returns, or what it has returned to another worker of this run that was given the same.

    Args:
        given: all that decides on the graph and its costs.
        built: builds the model, and learns its configuration from the one that was captured.
        capture: captures the model. A worker that is a process always does.
    """
    worker = here.get()
    if worker is None:
        return capture()
    found: list[tuple[object, Configured, PartitionedModel]] = worker.captures
    for known, configured, model in found:
        if same(known, given):
            built.json, built.has_adapters = configured.json, configured.has_adapters
            return model
    model = capture()
    found.append((given, built, model))
    return model


def same(one: object, other: object) -> bool:
    """Whether two things of a script's are the same, or functions of the same code that see the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return one == other
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape) and torch.equal(
            one, other
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Namespace | SimpleNamespace):
        return same(vars(one), vars(other))
    parts = _parts(one)
    return parts is not None and same(parts, _parts(other))


def _parts(function: Any) -> tuple[Any, ...] | None:
    """What two functions that do the same share; None of anything else."""
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    if isinstance(function, MethodType):
        return function.__func__, function.__self__
    if isinstance(function, FunctionType):
        if function.__dict__:
            return None
        try:
            seen = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable without a value yet
            return None
        where = (id(function.__code__), id(function.__globals__))
        return (*where, seen, function.__defaults__, function.__kwdefaults__)
    return None
