"""Inputs of a stage that wait for their R: a fixed number on the device, the others in host memory.

An input leaves after its F if no place is free, and comes back one R before its own, in the order of the backwards.
Those that stay are never copied, so that as few as possible are.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from varuna.engine.device.host_copies import CPU_COPIES, DONE, HostCopies, Ready


class StashedInput(NamedTuple):
    """The input with which R of a micro-batch begins, by name."""

    values: dict[str, Tensor]
    """that crossed into the stage, or into its first section with a gradient"""
    samples: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the input, in a fixed order."""
        return [*self.values.values(), *self.samples.values()]

    def replaced(self, tensors: Sequence[Tensor]) -> "StashedInput":
        """Return the same with other tensors, in the order of ``tensors``."""
        count = len(self.values)
        return StashedInput(
            dict(zip(self.values, tensors[:count], strict=True)), dict(zip(self.samples, tensors[count:], strict=True))
        )


class InputStash:
    """Inputs by micro-batch, over one step."""

    def __init__(self, order: Sequence[int], *, places: int | None = None, copies: HostCopies = CPU_COPIES) -> None:
        """Begin empty.

        Args:
            order: of the backwards.
            places: inputs that wait on the device, beside those on their way; None: all of them.
            copies: of the others, to host memory and back.
        """
        # R's go in the order of the backwards, so the next one to come back is known.
        self._following = dict(pairwise(order))
        self._places, self._copies = places, copies
        self._on_device: dict[int, StashedInput] = {}
        self._in_host: dict[int, StashedInput] = {}
        self._arriving: dict[int, tuple[StashedInput, Ready]] = {}
        self._left: Ready = DONE  # of the newest in host memory

    def finish_copy(self) -> None:
        """Wait, before an F, until the input that left last needs no device memory any more."""
        self._left.wait()

    def put_input(self, micro_batch: int, waiting: StashedInput) -> None:
        """Keep the input of an F until ``take_input``."""
        if self._places is None or len(self._on_device) < self._places:
            self._on_device[micro_batch] = waiting
            return
        home = waiting.replaced([self._copies.room_for(value) for value in waiting.tensors])
        self._left = self._copies.copy_to_host(list(zip(waiting.tensors, home.tensors, strict=True)))
        self._in_host[micro_batch] = home

    def take_input(self, micro_batch: int) -> StashedInput:
        """Return the input of an R, on the device; the copy of the next R's begins."""
        if micro_batch in self._on_device:
            waiting = self._on_device.pop(micro_batch)
        else:
            self._fetch(micro_batch)
            waiting, arrived = self._arriving.pop(micro_batch)
            self._copies.compute_after(arrived)
        # One ahead, no more: the plan has memory for the current one and the next (STASH_IN_TRANSIT).
        self._fetch(self._following.get(micro_batch))
        return waiting

    def _fetch(self, micro_batch: int | None) -> None:
        if micro_batch in self._in_host:
            home = self._in_host.pop(micro_batch)
            # After the newest copy to the host, which may be this one's own.
            tensors, arrived = self._copies.fetch(home.tensors, self._left)
            self._arriving[micro_batch] = home.replaced(tensors), arrived
