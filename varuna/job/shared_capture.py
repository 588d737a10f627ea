"""One capture for all workers of a run: threads of one process share it, others get it through the manager.

Whatever a newcomer would capture, it must compute what the run computes. So it may as well take the run's graphs, if
it was given the same model; capturing them takes seconds, which a run without a spare waits for.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from varuna.job.model_config import Configured
from varuna.membership.launched import here, manager
from varuna.membership.managed import ManagedMembership
from varuna.partition.model import PartitionedModel
from varuna.partition.opaque.met import reporting
from varuna.partition.written.graphs import CannotShareError
from varuna.partition.written.model import from_bytes, to_bytes
from varuna.process.console import warn

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def captured_once(
    given: object,
    capture: Callable[[], PartitionedModel],
    *,
    built: Configured,
    key: Callable[[], str | None],
) -> PartitionedModel:
    """Return what ``capture`` returns, or what another worker of the run has captured that was given the same.

    Args:
        given: all that decides on the graph and its costs.
        capture: captures the model.
        built: builds the model, and learns its configuration from the one that was captured.
        key: the same of another process; None: it cannot be told.
    """
    worker = here.get()
    if worker is None:
        run = manager()
        return capture() if run is None else _captured_in(run, key(), capture)
    found: list[tuple[object, Configured, PartitionedModel]] = worker.captures
    for known, configured, model in found:
        if is_same(known, given):
            built.json, built.has_adapters = configured.json, configured.has_adapters
            built.marks.update(configured.marks)
            return model
    model = capture()
    found.append((given, built, model))
    return model


def _captured_in(run: ManagedMembership, key: str | None, capture: Callable[[], PartitionedModel]) -> PartitionedModel:
    if key is None:
        return capture()
    if data := run.seek_work(key, "the captured model"):
        try:
            return from_bytes(data)
        except CannotShareError as error:
            warn(f"{error}; this worker captures the model itself")
            return capture()
    data = b""  # others do the same, without waiting, if it fails or cannot be passed on
    try:
        with reporting(lambda: run.offer_work(key, b"")):
            model = capture()
        data = _bytes_of(model)
    finally:
        run.offer_work(key, data)
    return model


def _bytes_of(model: PartitionedModel) -> bytes:
    try:
        return to_bytes(model)
    except CannotShareError:
        return b""


def is_same(one: object, other: object) -> bool:
    """Return whether two things of a script's are the same, or functions of the same code that see the same."""
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
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, Namespace | SimpleNamespace):
        return is_same(vars(one), vars(other))
    parts = _parts(one)
    return parts is not None and is_same(parts, _parts(other))


def _parts(function: Any) -> tuple[Any, ...] | None:
    """Return the parts that two functions share if they do the same; None of anything else."""
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
