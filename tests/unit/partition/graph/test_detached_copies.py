"""A capture does not depend on who else looks at it."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor, nn

from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition


class Reordered(nn.Module):
    """Makes tensors in ``forward`` as sparse experts do: an order and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        order = torch.argsort(h.detach().sum(1))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(h.shape[0])
        loss: Tensor = (h[inverse] * torch.full((len(h), 4), 2.0)).mean()
        return loss


@contextmanager
def holding_frames() -> Iterator[None]:
    """Keep what functions worked on for a while after they return, as a profiler of this thread or of all may."""
    held: deque[FrameType] = deque(maxlen=200)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: held.append(frame))
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_capture_is_the_same_while_someone_holds_its_frames() -> None:
    batch = {"x": torch.randn(3, 4)}
    alone = partition(Recipe(Reordered), batch)
    with holding_frames():
        watched = partition(Recipe(Reordered), batch)
    assert watched.facts == alone.facts
    assert "arange" in "".join(section.module.code for section in watched.sections)
