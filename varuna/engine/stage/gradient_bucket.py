"""Sums of gradients, one flat fp32 buffer for each section."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from varuna.core.model import TiedParameter

_NORM_RUN = 4096


class Bucket:
    """Gradients of one section in one flat buffer: accumulated, reduced and normed as a whole.

    Those of complex parameters are pairs in it.

    Everything that sums does so per section, so merging or splitting stages cannot change a bit.
    """

    def __init__(self, leaves: Mapping[str, Tensor], device: torch.device, flat: Tensor | None = None) -> None:
        """Begin with zeros, or with sums of the same leaves, whose memory is taken over.

        Args:
            leaves: by parameter.
            device: where the sums are.
            flat: of another bucket.
        """
        self.names = tuple(sorted(leaves, key=lambda name: not leaves[name].is_complex()))  # pairs begin at even places
        self._leaves, self._drops = dict(leaves), False
        self._sizes = [leaves[name].numel() * (2 if leaves[name].is_complex() else 1) for name in self.names]
        self.size, self.views = sum(self._sizes), dict[str, Tensor]()
        self._lie_in(torch.zeros(self.size, dtype=torch.float32, device=device) if flat is None else flat)

    def _lie_in(self, flat: Tensor) -> None:
        self.flat = flat
        self._in_place: list[tuple[Tensor, Tensor]] = []  # leaves, and where they add up themselves
        self._cast: list[tuple[Tensor, Tensor]] = []  # leaves of another dtype, and where their gradients are summed
        for name, part in zip(self.names, torch.split(flat, self._sizes) if self._sizes else (), strict=True):
            leaf = self._leaves[name]
            view = torch.view_as_complex(part.view(*leaf.shape, 2)) if leaf.is_complex() else part.view(leaf.shape)
            self.views[name] = view
            (self._in_place if leaf.dtype is view.dtype else self._cast).append((leaf, view))
        self._receive()

    def renew(self) -> None:
        """Leave the memory to code that still refers to gradients, as plain PyTorch does; new values are anything."""
        for leaf, _ in self._in_place:
            leaf.grad = None
        self.views.clear()
        self._in_place, self._cast, self.flat = [], [], self.flat.new_empty(0)  # or both would take memory
        self._lie_in(self.flat.new_empty(self.size))

    def _receive(self) -> None:
        for leaf, view in self._in_place:
            # Autograd adds in place to a ``grad`` that is there: no second copy, and all of a section lies together.
            leaf.grad = view

    def collect(self) -> None:
        """Add what a backward left in leaves of another dtype; others add up in place."""
        if not self._cast:
            return
        found = [(total, leaf.grad) for leaf, total in self._cast if leaf.grad is not None]
        if found and not self._drops:
            torch._foreach_add_([total for total, _ in found], [gradient for _, gradient in found])
        for leaf, _ in self._cast:
            leaf.grad = None

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the gradients of a backward that runs in this block, up to ``collect``."""
        self._drops = True
        for leaf, _ in self._in_place:
            leaf.grad = None
        try:
            yield
        finally:
            self._drops = False
            self._receive()


def squared_norms(
    buckets: Mapping[int, Bucket],
    tied: Sequence[TiedParameter],
    totals: Mapping[str, Tensor],
    *,
    but: frozenset[str] = frozenset(),
) -> dict[int, float]:
    """Return the squared L2 norm by section, float64; the device is waited for once.

    Args:
        buckets: by section, reduced.
        tied: parameters whose gradients are summed over sections; they count at their owner only.
        totals: those sums.
        but: parameters that do not count.
    """
    norms = [_of_section(section, bucket, tied, totals, but) for section, bucket in buckets.items()]
    return dict(zip(buckets, torch.stack(norms).tolist(), strict=True)) if norms else {}


def _of_section(
    section: int, bucket: Bucket, tied: Sequence[TiedParameter], totals: Mapping[str, Tensor], but: frozenset[str]
) -> Tensor:
    # The usual case takes one pass over the buffer; otherwise each parameter is normed by itself.
    apart = {p.name for p in tied} | but
    if apart.isdisjoint(bucket.names):
        return _squared(bucket.flat)
    none = torch.zeros((), dtype=torch.float64, device=bucket.flat.device)
    own = sum((_squared(bucket.views[name]) for name in bucket.names if name not in apart), none)
    return own + sum((_squared(totals[p.name]) for p in tied if p.owner == section and p.name not in but), none)


def _squared(values: Tensor) -> Tensor:
    """Return the squared L2 norm: fp32 within runs, float64 over them (float64 throughout costs 2 % of a step)."""
    flat = values.reshape(-1)
    whole = flat.numel() // _NORM_RUN * _NORM_RUN
    # Runs begin at the section's first number, so the norm does not depend on the plan.
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_RUN), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    both: Tensor = runs.square().sum() + rest.square()
    return both
