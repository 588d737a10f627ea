"""Buffers that forward reads and then writes: in any plan they become what plain PyTorch makes of the whole batch."""

from typing import Any

import pytest
import torch

from tests.unit.engine.carrying import (
    Centred,
    Codebook,
    Queued,
    Scaled,
    Spectral,
    one_process,
    replaced,
    setup,
    state_of,
)
from tests.unit.engine.ranks import single_threaded


@pytest.mark.parametrize("build", [Centred, replaced, Codebook, Queued, Spectral, Scaled])
def test_losses_and_buffers_are_those_of_whole_batches(build: Any) -> None:
    with single_threaded():
        expected, model = one_process(build)
        depth = min(3, len(setup(build).model.sections))
        for shape in [(1, 1), (depth, 1), (1, 2)]:
            job = setup(build)
            found = job.losses(*shape, steps=len(expected))
            assert [loss for loss, _ in found] == pytest.approx(expected, rel=1e-5), shape
            state = state_of(job)
            for name, value in model.named_buffers():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
