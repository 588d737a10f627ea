"""Sums of gradients, one flat fp32 buffer for each section."""

from collections.abc import Mapping

import torch
from torch import Tensor

_NORM_RUN = 4096


class Bucket:
    """Gradients of one section in one flat buffer: accumulated, reduced and normed as a whole.

    Everything that sums does so per section, so merging or splitting stages cannot change a bit (DESIGN §5.2).
    """

    def __init__(self, leaves: Mapping[str, Tensor], device: torch.device) -> None:
        self.names = tuple(leaves)
        sizes = [leaf.numel() for leaf in leaves.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.views = dict(zip(leaves, torch.split(self.flat, sizes) if sizes else (), strict=True))
        self._cast: list[tuple[Tensor, Tensor]] = []  # leaves of another dtype, and where their gradients are summed
        for name, leaf in leaves.items():
            self.views[name] = self.views[name].view(leaf.shape)
            if leaf.dtype is torch.float32:
                leaf.grad = self.views[name]
            else:
                self._cast.append((leaf, self.views[name]))

    def collect(self) -> None:
        """Add what a backward left in leaves of another dtype; others add up in place."""
        for leaf, total in self._cast:
            if leaf.grad is not None:
                total.add_(leaf.grad)
                leaf.grad = None


def squared(values: Tensor) -> float:
    """Squared L2 norm: fp32 within short runs, float64 over them (float64 throughout costs 2 % of a step)."""
    flat = values.reshape(-1)
    whole = flat.numel() // _NORM_RUN * _NORM_RUN
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_RUN), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    return float(runs.square().sum() + rest.square())
