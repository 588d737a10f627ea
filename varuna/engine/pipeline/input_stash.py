"""Inputs of a stage that wait for their R: so many on the device, the others in host memory.

An input goes after its F if no place is free, and comes back one R ahead of its own, in the order of the backwards.
Those that stay never cross, so that the fewest possible do.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from varuna.engine.device.staging import Ferry


class StashedInput(NamedTuple):
    """What R of a micro-batch begins with, by name."""

    values: dict[str, Tensor]
    """that crossed into the stage, or into its first section with a gradient"""
    samples: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [*self.values.values(), *self.samples.values()]

    def replaced(self, tensors: Sequence[Tensor]) -> "StashedInput":
        """The same with other tensors, in the order of ``tensors``."""
        count = len(self.values)
        return StashedInput(
            dict(zip(self.values, tensors[:count], strict=True)), dict(zip(self.samples, tensors[count:], strict=True))
        )


class InputStash:
    """Inputs by micro-batch, over one step."""

    def __init__(self, order: Sequence[int], *, places: int | None = None, ferry: Ferry | None = None) -> None:
        """Begin empty.

        Args:
            order: of the backwards.
            places: inputs that wait on the device, beside those on their way; None: all of them.
            ferry: takes the others to host memory and back; needed with ``places``.
        """
        assert places is None or ferry is not None
        self._following = dict(pairwise(order))
        self._places, self._ferry = places, ferry
        self._here: dict[int, StashedInput] = {}
        self._away: dict[int, StashedInput] = {}
        self._arriving: dict[int, StashedInput] = {}

    def settle(self) -> None:
        """Before an F: the input that left last needs no device memory any more."""
        if self._ferry is not None:
            self._ferry.settle()

    def put(self, micro_batch: int, waiting: StashedInput) -> None:
        """After an F: keep its input until ``take``."""
        if self._ferry is None or self._places is None or len(self._here) < self._places:
            self._here[micro_batch] = waiting
            return
        home = waiting.replaced([self._ferry.room_for(value) for value in waiting.tensors])
        self._ferry.bring_back(list(zip(waiting.tensors, home.tensors, strict=True)))
        self._away[micro_batch] = home

    def take(self, micro_batch: int) -> StashedInput:
        """Before an R: its input, on the device; that of the next R sets out."""
        if micro_batch in self._here:
            waiting = self._here.pop(micro_batch)
        else:
            assert self._ferry is not None
            if micro_batch not in self._arriving:
                self._arriving[micro_batch] = self._fetched(micro_batch)
            waiting = self._arriving.pop(micro_batch)
            self._ferry.meet()
        following = self._following.get(micro_batch)
        if following is not None and following in self._away:
            self._arriving[following] = self._fetched(following)
        return waiting

    def _fetched(self, micro_batch: int) -> StashedInput:
        assert self._ferry is not None
        home = self._away.pop(micro_batch)
        return home.replaced(self._ferry.fetch(home.tensors))
