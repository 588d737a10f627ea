"""The graph that each micro-batch runs, where several lengths are declared; and its sizes, where they are open.

Both follow from its samples alone, and every stage reads those: a stage that needs no input reads one that tells them.
So the sizes of messages need no negotiation, nor does the order in which a pipeline
runs its micro-batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

from varuna.core.errors import LinkError
from varuna.data.samples import MicroBatch
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel


class ToldBySamples(NamedTuple):
    """The graph that a micro-batch runs, and how large its tensors are, as its samples tell."""

    variant: int = 0
    """index into the model's graphs"""
    sizes: tuple[int, ...] = ()
    """the sizes that are open"""


_NOTHING = ToldBySamples()


class Variants:
    """Graphs and sizes of one rank's micro-batches in one generation, as samples told them.

    The loader's thread notes it, all others read it.
    """

    def __init__(self, model: PartitionedModel, inbox: Inbox) -> None:
        self._model, self._inbox = model, inbox
        self._known: dict[tuple[int, int], ToldBySamples] = {}
        self.several = bool(model.variants)
        """graphs"""
        self._tell = bool(model.telling_keys)

    def note(self, step: int, micro_batch: int, batch: MicroBatch) -> None:
        """Note what is told of a micro-batch whose samples have been read.

        Raises:
            DataError: their length was not declared, or their sizes are not what was captured.
        """
        if self._tell:
            variant = variant_of(self._model, batch.tensors, batch.indices)
            sizes = self._model.sizes
            found = () if sizes is None else sizes.of(batch.tensors, batch.indices)
            self._known[step, micro_batch] = ToldBySamples(variant, found)

    def told(self, step: int, micro_batch: int) -> ToldBySamples:
        """Return what is told of a micro-batch, once its samples have been read."""
        return self._known[step, micro_batch] if self._tell else _NOTHING

    def of(self, step: int, micro_batch: int) -> int:
        """Index into the model's graphs, once the samples have been read."""
        return self.told(step, micro_batch).variant

    def first_unread(self, step: int, micro_batches: Sequence[int]) -> int | None:
        """The first of these whose samples have not been read, or could not be."""
        return next((micro_batch for micro_batch in micro_batches if (step, micro_batch) not in self._known), None)

    def are_known(self, step: int, micro_batches: Sequence[int]) -> bool:
        """Return whether nothing has to be told of these, or all is told."""
        return not self._tell or self.first_unread(step, micro_batches) is None

    def wait(self, step: int, *micro_batches: int) -> bool:
        """Wait until all samples of these have been read; False if the generation ends first."""
        if not self._tell:
            return True
        try:
            self._inbox.pause(lambda: self.first_unread(step, micro_batches) is None)
        except (GenerationEnded, LinkError):  # the training thread is told too
            return False
        return True

    def forget(self, before: int) -> None:
        """Forget steps before ``before``."""
        if self._tell:
            for key in [key for key in self._known if key[0] < before]:
                del self._known[key]
