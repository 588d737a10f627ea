"""Schedulers that the script's loop steps: their counts are state of the run, as what ``state=`` names."""

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.io.user_values import as_json
from varuna.core.errors import UsageError


class Schedule:
    """The part of a scheduler's state that a checkpoint can hold: all of torch's own but functions."""

    def __init__(self, scheduler: LRScheduler) -> None:
        """Keep this one's."""
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, and what is made of these; of other schedulers in it, each is kept by itself."""
        return {key: value for key, value in self._scheduler.state_dict().items() if _is_plain(value)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take such a state, and leave the rest as it is."""
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), **state_dict})


def schedules_of_loop(optimizer: torch.optim.Optimizer, but: Iterable[Any]) -> dict[str, Schedule]:
    """Schedulers of the script's optimizer, wherever the script has them, by names that are the same on all workers.

    Args:
        optimizer: as the script has built it.
        but: those that are not wanted.
    """
    others = {id(each) for each in but}
    every: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    mine = [each for each in every if getattr(each, "optimizer", None) is optimizer and id(each) not in others]
    found = [(type(each).__name__, Schedule(each)) for each in mine]
    found.sort(key=lambda each: (each[0], repr(each[1].state_dict())))  # the order of gc is another one on each worker
    return {f"the loop's {name} ({number})": each for number, (name, each) in enumerate(found)}


def _is_plain(value: Any) -> bool:
    try:
        as_json(value, "")
    except UsageError:
        return False
    return True
