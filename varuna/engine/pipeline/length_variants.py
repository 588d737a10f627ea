"""Which graph each micro-batch runs, where several lengths are declared.

The length of a micro-batch follows from its samples alone, and every stage reads those: a stage that needs no input
reads one that tells the length. So the sizes of messages need no negotiation, nor does the order in which a pipeline
runs its micro-batches.
"""

from collections.abc import Sequence

from varuna.core.errors import LinkError
from varuna.data.samples import MicroBatch
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.partition.lengths import variant_of
from varuna.partition.model import PartitionedModel


class Variants:
    """The graph of each of one rank's micro-batches in one generation; set by the loader's thread, read by all."""

    def __init__(self, model: PartitionedModel, inbox: Inbox) -> None:
        self._model, self._inbox = model, inbox
        self._known: dict[tuple[int, int], int] = {}
        self.several = bool(model.variants)

    def note(self, step: int, micro_batch: int, batch: MicroBatch) -> None:
        """Note the graph for a micro-batch whose samples have been read.

        Raises:
            DataError: their length was not declared.
        """
        if self.several:
            self._known[step, micro_batch] = variant_of(self._model, batch.tensors, batch.indices)

    def of(self, step: int, micro_batch: int) -> int:
        """Index into the model's graphs, once the samples have been read."""
        return self._known[step, micro_batch] if self.several else 0

    def first_unread(self, step: int, micro_batches: Sequence[int]) -> int | None:
        """The first of these whose samples have not been read, or could not be."""
        return next((micro_batch for micro_batch in micro_batches if (step, micro_batch) not in self._known), None)

    def wait(self, step: int, *micro_batches: int) -> bool:
        """Wait until all samples of these have been read; False if the generation ends first."""
        if not self.several:
            return True
        try:
            self._inbox.pause(lambda: self.first_unread(step, micro_batches) is None)
        except (GenerationEnded, LinkError):  # the training thread is told too
            return False
        return True

    def forget(self, before: int) -> None:
        """Forget steps before ``before``."""
        if self.several:
            for key in [key for key in self._known if key[0] < before]:
                del self._known[key]
