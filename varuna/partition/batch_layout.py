"""The layout that a batch must have: the graph was captured for one shape of sample."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.sizes import OpenSizes, of_samples, rows_in


@dataclass(frozen=True)
class InputLayout:
    """One key of the batch as it was captured."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """of one sample; with open sizes about that"""
    whole: tuple[int | None, ...] | None = None
    """with open sizes: of the tensor; None where the size is open"""

    @property
    def size_bytes(self) -> int:
        """Bytes of one sample's tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        if self.whole is not None:
            return _text(self.dtype, ["any" if size is None else size for size in self.whole])
        return _text(self.dtype, ("batch", *self.shape))

    def fits(self, value: Tensor) -> bool:
        """Return whether a tensor of a batch is what was captured."""
        if value.dtype is not self.dtype:
            return False
        if self.whole is None:
            return value.shape[1:] == self.shape
        return value.dim() == len(self.whole) and all(
            mine in (None, size) for mine, size in zip(self.whole, value.shape, strict=True)
        )


def layouts_of(
    batch: Mapping[str, Tensor], keys: Iterable[str], sizes: OpenSizes | None = None
) -> dict[str, InputLayout]:
    """Layouts of the ``keys`` that a graph reads, of a batch with ``sizes`` if those are open."""
    if sizes is None:
        return {key: InputLayout(batch[key].dtype, tuple(batch[key].shape[1:])) for key in dict.fromkeys(keys)}
    opened = {place: each for places, each in zip(sizes.places, sizes.per_sample, strict=True) for place in places}
    found = {}
    for key in dict.fromkeys(keys):
        shape = enumerate(batch[key].shape)
        whole = tuple(None if (key, dim) in opened else size for dim, size in shape)
        one = tuple(round(opened[key, dim]) if size is None else size for dim, size in enumerate(whole))
        found[key] = InputLayout(batch[key].dtype, one, whole)
    return found


def check_inputs(layouts: Mapping[str, InputLayout], batch: Mapping[str, Tensor], indices: Sequence[int]) -> None:
    """Compare a batch with what was captured; keys that the model does not read may be anything.

    Args:
        layouts: what was captured.
        batch: collated samples.
        indices: of the samples in the dataset, for the message.

    Raises:
        DataError: a shape or a dtype differs, or there are more rows than samples, or unlike numbers of rows.
    """
    if all(layout.whole is None for layout in layouts.values()):
        _check_rows(of_samples(batch), indices)
    for key, value in batch.items():
        layout = layouts.get(key)
        if layout is None or layout.fits(value):
            continue
        shape = (*(["batch"] if layout.whole is None else value.shape[:1]), *value.shape[1:])
        raise DataError(
            f"{key!r} is {_text(value.dtype, shape)} in the batch of dataset indices {list(indices)}, "
            f"but the model was captured with {layout}. {_remedy(value, layout)}"
        )


def _check_rows(batch: Mapping[str, Tensor], indices: Sequence[int]) -> None:
    rows = rows_in(batch)
    for key, value in batch.items():
        if not value.dim() or value.size(0) != rows or rows > len(indices):
            raise DataError(
                f"collate was given {len(indices)} samples (dataset indices {list(indices)}), but {key!r} has shape "
                f"{tuple(value.shape)}; in the first samples of the run, the first dimension of every tensor was the "
                "number of samples. It may leave samples out, but of all tensors alike."
            )


def _remedy(value: Tensor, layout: InputLayout) -> str:
    if value.dtype is not layout.dtype:
        return f"Convert it in the dataset or in collate=, with .to({layout.dtype})."
    if layout.whole is not None:
        return (
            "Sizes may vary that vary among the first samples, and only those. Pad the others to one size in the "
            "dataset or in collate=."
        )
    return (
        "Only the number of samples may vary in a run; every other dimension is fixed by the first samples. Pad or "
        "cut all samples to one length in the dataset or in collate=. To pad to the longest of a batch, let the "
        "function round up to a few lengths, and declare them: collate=varuna.Collate(function, lengths=[64, 128]), "
        "with Hugging Face's DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64) for example."
    )


def _text(dtype: torch.dtype, shape: Sequence[object]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
