"""A step's size and pace, as the training loop is told of them."""

import pytest
import torch

from tests.unit.engine.models import SmallLanguage, Tokens
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.data import sample_index
from varuna.results import step_of


def test_targets_are_the_tokens_that_the_loss_averages_over() -> None:
    setup = Setup(build=SmallLanguage, dataset=Tokens(padded=True))
    with single_threaded():
        ranks = setup.run(2, 1, steps=3)
    for committed in ranks[0]:
        first = committed.step * setup.global_batch
        positions = range(first, first + setup.global_batch)
        indices = [sample_index(position, size=len(setup.dataset), seed=setup.seed) for position in positions]
        counted = sum(int((setup.dataset[index]["labels"] != -100).sum()) for index in indices)
        step = step_of(committed, setup.global_batch, torch.float32)
        assert step.targets == counted < setup.global_batch * 16
        assert step.step_s > 0
        assert step.targets_per_s == pytest.approx(counted / step.step_s)
        assert step.examples_per_s == pytest.approx(setup.global_batch / step.step_s)
    assert [each.totals.weight for each in ranks[1]] == [each.totals.weight for each in ranks[0]]
