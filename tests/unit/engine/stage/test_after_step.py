"""What ``after_step`` writes is state: the same in any plan, for every holder, and after whatever happens to a run."""

from typing import Any

import pytest
import torch

from tests.unit.engine.carrying import Balanced, Taught, balance, follow, one_process, setup, state_of
from tests.unit.engine.ranks import single_threaded

CASES = [(Taught, follow), (Balanced, balance)]
SHAPES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]


def plainly(after: Any) -> Any:
    return after if after is balance else lambda parameters, buffers, _step: after(parameters, buffers)


@pytest.mark.parametrize(("build", "after"), CASES)
def test_losses_and_state_are_those_of_a_plain_loop(build: Any, after: Any) -> None:
    with single_threaded():
        expected, model = one_process(build, plainly(after))
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for shape in SHAPES:
            job = setup(build, after_step=after)
            found = job.losses(*shape, steps=len(expected))
            assert [loss for loss, _ in found] == pytest.approx(expected, rel=1e-5), shape
            state = state_of(job)
            assert set(state) == {name for name in named if name != "unused.bias"}
            for name, value in state.items():
                torch.testing.assert_close(value, named[name].detach(), rtol=1e-4, atol=1e-5)
