"""What a batch must look like: the graph was captured for one shape of sample."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.core.errors import DataError


@dataclass(frozen=True)
class InputLayout:
    """One key of the batch as it was captured."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """of one sample"""

    @property
    def size_bytes(self) -> int:
        """Bytes of one sample's tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return _text(self.dtype, self.shape)


def layouts_of(batch: Mapping[str, Tensor], keys: Iterable[str]) -> dict[str, InputLayout]:
    """Layouts of the ``keys`` that a graph reads."""
    return {key: InputLayout(batch[key].dtype, tuple(batch[key].shape[1:])) for key in dict.fromkeys(keys)}


def check_inputs(layouts: Mapping[str, InputLayout], batch: Mapping[str, Tensor], indices: Sequence[int]) -> None:
    """Compare a batch with what was captured; keys that the model does not read may be anything.

    Args:
        layouts: what was captured.
        batch: collated samples.
        indices: of the samples in the dataset, for the message.

    Raises:
        DataError: a shape or dtype differs.
    """
    for key, value in batch.items():
        layout = layouts.get(key)
        if layout is None or (value.dtype is layout.dtype and value.shape[1:] == layout.shape):
            continue
        raise DataError(
            f"{key!r} is {_text(value.dtype, tuple(value.shape[1:]))} in the batch of dataset indices {list(indices)}, "
            f"but the model was captured with {layout}. {_remedy(value, layout)}"
        )


def _remedy(value: Tensor, layout: InputLayout) -> str:
    if value.dtype is not layout.dtype:
        return f"Convert it in the dataset or in collate=, with .to({layout.dtype})."
    return (
        "Only the number of samples may vary in a run; every other dimension is fixed by the first samples. Pad or "
        "cut all samples to one length in the dataset or in collate=. To pad to the longest of a batch, let the "
        "function round up to a few lengths, and declare them: collate=varuna.Collate(function, lengths=[64, 128]), "
        "with Hugging Face's DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64) for example."
    )


def _text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, ('batch', *shape)))}]"
