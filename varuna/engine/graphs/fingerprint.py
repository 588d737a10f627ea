"""A number for the bits of a tensor, so that two can be compared without having both in memory."""

import torch
from torch import Tensor

_WORD = torch.int32
_CHUNK_WORDS = 1 << 14
_FACTOR = 0x2545F4914F6CDD1D  # any odd number


def fingerprint(value: Tensor) -> Tensor:
    """64 bits, where the tensor is: two tensors of one shape that differ have the same with a chance of 2^-32 at most.

    Words times random numbers are added up, modulo 2^64, so the order of the sum does not count. 0.0 and -0.0 are the
    same. It takes half a MB beside the tensor, and the tensor once more if no shape of one dimension can show it.
    """
    flat = value.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    weights = _weights(value.device)
    each = _CHUNK_WORDS * _WORD.itemsize // flat.element_size()
    for first in range(0, flat.numel(), each):
        part = flat[first : first + each].contiguous()
        has_sign = part.element_size() > 1 and (part.is_floating_point() or part.is_complex())
        words = _words(part + 0 if has_sign else part)
        total.mul_(_FACTOR).add_(words.mul_(weights[: words.numel()]).sum())
    return total


def _words(part: Tensor) -> Tensor:
    octets = part.view(torch.uint8)
    beyond = -octets.numel() % _WORD.itemsize
    if beyond:
        octets = torch.nn.functional.pad(octets, (0, beyond))
    return octets.view(_WORD).to(torch.int64)


def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (_CHUNK_WORDS,), generator=generator).to(device)
