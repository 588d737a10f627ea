"""Digests of samples, which travel with micro-batches: all stages must have read the same sample."""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from varuna.core.sample_digest import FIELD, NORM_STEPS, PROJECTION_STEPS

_SIGNS = 2**16
_LARGEST = 1e100
"""Bound on a number in a sketch, so that its square is finite."""


def tensors_digest(tensors: Mapping[str, Tensor]) -> int:
    """Return a signed 64-bit digest of keys, dtypes, shapes and bytes; the order of the keys does not matter."""
    return _signed(_hash(tensors, lambda tensor: True).digest()[:8])


def sample_digest(sample: Mapping[str, Tensor]) -> int:
    """Return a signed 64-bit digest, to be compared by ``is_same_sample``: of bytes alone, if there are no floats."""
    if not any(map(_has_floats, sample.values())):
        return tensors_digest(sample)
    exact = _hash(sample, lambda tensor: not _has_floats(tensor)).digest()[:3]
    projection = norm = 0
    for key, tensor in sample.items():
        if _has_floats(tensor):
            its_projection, its_norm = _sketch(tensor, _signs(key))
            projection, norm = projection + its_projection, norm + its_norm
    sketch = projection % FIELD * FIELD + norm % FIELD
    return _signed(sketch.to_bytes(5, "little") + exact)


def row_digests(
    batch: Mapping[str, Tensor], size: int, digest: Callable[[Mapping[str, Tensor]], int] = tensors_digest
) -> tuple[int, ...]:
    """Return a digest of each of the ``size`` rows of a collated batch; without rows, one of all for each sample."""
    if any(value.dim() == 0 or len(value) != size for value in batch.values()):
        return (digest(batch),) * size
    return tuple(digest({key: value[row] for key, value in batch.items()}) for row in range(size))


def _hash(tensors: Mapping[str, Tensor], is_exact: Callable[[Tensor], bool]) -> "hashlib._Hash":
    digest = hashlib.sha1(usedforsecurity=False)  # four times as fast as blake2b: processors have instructions for it
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{len(key)}:{key}:{tensor.dtype}{tuple(tensor.shape)}".encode())
        if is_exact(tensor):
            flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest


def _signed(digest: bytes) -> int:
    """Signed, so that digests can travel in an int64 tensor."""
    return int.from_bytes(digest, "little", signed=True)


def _has_floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _sketch(tensor: Tensor, signs: NDArray[np.float64]) -> tuple[int, int]:
    """Return steps of the projection, and of the norm's logarithm."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    projection = square = 0.0
    for number, part in enumerate(torch.split(flat, _SIGNS)):
        known = part if part.dtype in (torch.float32, torch.float64) else part.float()
        values = known.numpy().astype(np.float64)  # by one thread, as einsum: many cost more than they gain here
        its_square = _dot(values, values)
        if not math.isfinite(its_square):
            values = np.nan_to_num(values, nan=1.0, posinf=2.0, neginf=-2.0).clip(-_LARGEST, _LARGEST)
            its_square = _dot(values, values)
        # Each run uses the same signs, times one of its own: runs that are swapped do not look alike.
        projection += _dot(values, signs[: len(values)]) * float(signs[number % _SIGNS])
        square += its_square
    if not square:
        return 0, 0
    return round(PROJECTION_STEPS * projection / math.sqrt(square)), round(NORM_STEPS * math.log2(square) / 2)


def _dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.einsum("i,i", one, other))


@lru_cache(maxsize=16)
def _signs(key: str) -> NDArray[np.float64]:
    """Random signs, the same everywhere, and others for each key: two tensors that are swapped must not look alike."""
    digest = hashlib.shake_128(f"varuna sample {key}".encode()).digest(_SIGNS // 8)
    return np.where(np.unpackbits(np.frombuffer(digest, np.uint8)), 1.0, -1.0)
