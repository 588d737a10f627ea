"""Datasets whose samples depend on their place in the run: ``set_epoch(n)`` and ``set_step(n)``.

Samples are read ahead, by threads and processes, and again by other workers. So the script cannot tell a dataset where
the run is: each reader tells it, just before it reads a sample.
"""

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch.utils.data import ConcatDataset, Subset

SETTERS = ("set_epoch", "set_step")


def with_setters(dataset: Any) -> Iterator[Any]:
    """Yield the dataset if it has one of ``SETTERS``, and else those that torch's own wrappers hold."""
    if any(callable(getattr(type(dataset), name, None)) for name in SETTERS):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from with_setters(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for each in dataset.datasets:
            yield from with_setters(each)


class PlacedDataset:
    """One dataset, and what it was told last in this process, by whichever source reads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._last: dict[str, int] = {}

    def tell(self, name: str, value: int) -> None:
        """Call a setter, unless its value is that of before; the caller keeps other readers out until it has read."""
        setter: Callable[[Any, int], object] | None = getattr(type(self.dataset), name, None)
        if setter is not None and self._last.get(name) != value:
            self._last.pop(name, None)  # if it raises, it is not known
            setter(self.dataset, value)
            self._last[name] = value


_known: WeakSet[PlacedDataset] = WeakSet()


def placed_datasets(dataset: Any) -> list[PlacedDataset]:
    """Return those who tell a dataset; sources of the same dataset share them."""
    found = []
    for each in with_setters(dataset):
        known = next((one for one in _known if one.dataset is each), None) or PlacedDataset(each)
        _known.add(known)
        found.append(known)
    return found
