"""Buffers that forward reads and then writes: in any plan they become what plain PyTorch makes of the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.depth import nightly
from tests.unit.engine.ranks import single_threaded
from tests.unit.testing.carrying import (
    Centred,
    Codebook,
    Normalised,
    Queued,
    Scaled,
    Spectral,
    one_process,
    replaced,
    setup,
    state_of,
)
from varuna.core.errors import ModelError


@pytest.mark.parametrize("build", [Codebook, Normalised, Scaled, *nightly(Centred, replaced, Queued, Spectral)])
def test_losses_and_buffers_are_those_of_whole_batches(build: Any) -> None:
    with single_threaded():
        expected, model = one_process(build)
        depth = min(2, len(setup(build).model.sections))
        for shape in [(1, 1), (depth, 2)]:
            job = setup(build)
            found = job.losses(*shape, steps=len(expected))
            assert [loss for loss, _ in found] == pytest.approx(expected, rel=1e-5), shape
            state = state_of(job)
            for name, value in model.named_buffers():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


class Late(Centred):
    """The loss follows from the centre of this very batch."""

    def forward(self, x: Tensor) -> Any:
        out = self.student(x)
        self.center.mul_(0.7).add_(out.detach().mean(0), alpha=0.3)
        return (out - self.center).pow(2).mean()


class Drawn(Queued):
    """The queue is filled with noise beside."""

    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        self.queue.add_(torch.randn_like(self.queue))
        return loss


class Numbered(Queued):
    """A place in the queue as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.place: Tensor
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        loss = self.net(x).pow(2).mean()
        place = int(self.place)
        self.queue[place : place + 1] = self.net(x).detach().mean(0)
        self.place.copy_((self.place + 1) % 16)
        return loss


@pytest.mark.parametrize(
    ("build", "buffer", "why"), [(Late, "center", "after it was written"), (Drawn, "queue", "draws at random")]
)
def test_what_does_not_follow_from_the_whole_batch_is_refused_with_a_way_out(build: Any, buffer: str, why: str) -> None:
    with pytest.raises(ModelError, match=rf"buffer {buffer} .*{why}.*after_step="):
        setup(build)


def test_a_place_in_a_buffer_is_no_python_number() -> None:
    with pytest.raises(ModelError, match=r"place"):
        setup(Numbered)
