"""Objects that steer the rates of the script's loop: their counts are state of the run, as what ``state=`` names.

These are schedulers that the loop steps, and the script's own objects around its optimizer (a Noam rate, a trainer).
"""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.io.user_values import as_json
from varuna.core.errors import UsageError
from varuna.engine.worker.loop_state import MAY_DIFFER
from varuna.job.handed_over.code_reads import is_library
from varuna.job.handed_over.marks import PLAIN


class Schedule:
    """The part of a scheduler's state that a checkpoint can hold: all of torch's own but functions."""

    of = "the loop's"

    def __init__(self, scheduler: LRScheduler) -> None:
        """Keep this one's."""
        self.whole = scheduler
        self.first = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Numbers, texts, and what is made of these; of other schedulers in it, each is kept by itself."""
        return {key: value for key, value in self.whole.state_dict().items() if _is_plain(value)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take such a state, and leave the rest as it is."""
        self.whole.load_state_dict({**self.whole.state_dict(), **state_dict})


class Holder:
    """Numbers and texts of an object that has the optimizer, as far as the loop has changed them."""

    of = MAY_DIFFER

    def __init__(self, whole: Any) -> None:
        """Take it as it is before the loop."""
        self.whole = whole
        self.first = self._values()

    def state_dict(self) -> dict[str, Any]:
        """Return those that are not as before the loop."""
        return {key: value for key, value in self._values().items() if value != self.first.get(key, ...)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take those, and the others from before the loop."""
        vars(self.whole).update({**self.first, **state_dict})

    def _values(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self.whole).items() if isinstance(value, PLAIN)}


def steering_of_loop(optimizer: torch.optim.Optimizer, but: Iterable[Any]) -> dict[str, Schedule | Holder]:
    """Find what has the script's optimizer, wherever the script has it; names are the same on all workers.

    Args:
        optimizer: as the script has built it.
        but: those that are not wanted.
    """
    others = {id(each) for each in but}
    every: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    mine = [each for each in every if getattr(each, "optimizer", None) is optimizer and id(each) not in others]
    around = [each for each in _holders(optimizer) if id(each) not in others]
    found: list[Schedule | Holder] = [*map(Schedule, mine), *map(Holder, around)]
    found.sort(key=lambda each: (_name(each), repr(each.first)))  # the order of gc is another one on each worker
    return {f"{each.of} {_name(each)} ({number})": each for number, each in enumerate(found)}


def wholes(kept: Mapping[str, Any]) -> list[Any]:
    """Return the script's own objects whose state is kept."""
    return [each.whole if isinstance(each, Schedule | Holder) else each for each in kept.values()]


def _holders(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield objects of the script's own classes that have the optimizer as an attribute."""
    tables = [each for each in gc.get_referrers(optimizer) if type(each) is dict]
    for each in gc.get_referrers(optimizer, *tables):
        own = getattr(each, "__dict__", None)
        has_it = type(own) is dict and any(value is optimizer for value in own.values())
        if has_it and not isinstance(each, ModuleType) and all(map(_is_scripts, type(each).__mro__)):
            yield each


def _is_scripts(kind: type) -> bool:
    """Return whether a class is the script's own, or a base from Python's library."""
    root = kind.__module__.partition(".")[0]
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", ""))
    return root in sys.stdlib_module_names or not (root == "varuna" or is_library(file))


def _name(kept: Schedule | Holder) -> str:
    return type(kept.whole).__name__


def _is_plain(value: Any) -> bool:
    try:
        as_json(value, "")
    except UsageError:
        return False
    return True
