"""The value that readers make and stages take."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Samples that flow through the pipeline together.

    Attributes:
        tensors: the inputs that were asked for; the first dimension counts samples, or ``data.sizes`` tells how many.
        digests: a signed 64-bit digest of each sample with all its keys: as named tensors of the dataset, or its row of
            what ``collate`` returned. Empty where they are not compared.
        indices: index into the dataset of each sample.
    """

    tensors: dict[str, Tensor]
    digests: tuple[int, ...]
    indices: tuple[int, ...]
