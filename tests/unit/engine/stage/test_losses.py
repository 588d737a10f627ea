"""Losses come from the device by themselves; how much a micro-batch counts is known without waiting for it."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.unit.engine.late import LateStreams
from tests.unit.engine.models import Tokens, tiny_gpt2
from tests.unit.engine.ranks import Setup
from varuna.core.errors import DataError
from varuna.core.sums import MicroBatchLoss
from varuna.engine.device.host_copies import HostCopies, Ready, StreamCopies
from varuna.engine.stage.losses import Losses, LossSums, sums_of
from varuna.engine.stage.section import Examples


def scalars(*values: float) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


def test_numbers_wait_for_the_device() -> None:
    losses = Losses(3, StreamCopies(LateStreams()), [MicroBatchLoss(micro_batch=7, values=(1.0, 2.0, 3.0))])
    losses.add(0, LossSums(scalars(0.5, 4.0), factor=3.0, weight=3.0, is_there=True))
    losses.add(1, LossSums(scalars(math.nan, 9.0), factor=0.0, weight=0.0, is_there=False))
    assert losses.numbers() == {7: [1.0, 2.0, 3.0], 0: [1.5, 3.0, 4.0], 1: [0.0, 0.0, 0.0]}
    losses.add(4, LossSums(scalars(2.0, 5.0), factor=2.0, weight=2.0, is_there=True))
    assert losses.numbers()[4] == [4.0, 2.0, 5.0]
    assert len(losses.numbers()) == 4


class Hung(HostCopies):
    """Of a device that is never done, but for the first copy."""

    def __init__(self) -> None:
        self.copies = 0

    def copy_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Ready | None = None) -> Ready:
        self.copies += 1
        return super().copy_to_host(pairs, after) if self.copies == 1 else Never()


class Never:
    """A copy that is never there."""

    def wait(self) -> None:
        raise AssertionError("somebody waits for a device that hangs")

    def passed(self) -> bool:
        return False


def test_what_has_to_be_said_now_waits_for_no_device_that_hangs() -> None:
    losses = Losses(2, Hung())
    for micro_batch in range(2):
        losses.add(micro_batch, LossSums(scalars(0.5), factor=3.0, weight=3.0, is_there=True))
    assert losses.numbers(now=True) == {0: [1.5, 3.0]}
    with pytest.raises(AssertionError, match="hangs"):
        losses.numbers()


def weighed(setup: Setup, results: list[Tensor], weight: float | None = None) -> LossSums:
    batch = setup.source.micro_batch([0, 1])
    weigh = None if weight is None else lambda tensors: weight
    return sums_of(setup.model, weigh, 0, results, Examples({}, 2), batch, 2, 8)


def test_targets_are_counted_on_the_host_where_the_device_would_have_to_be_waited_for() -> None:
    setup = Setup(build=tiny_gpt2, dataset=Tokens(padded=True))
    on_device = torch.empty((), device="meta")  # nobody can read it
    labels = setup.source.micro_batch([0, 1]).tensors["labels"]
    counted = weighed(setup, [on_device, on_device])
    assert counted.factor == counted.weight == float((labels[:, 1:] != -100).sum())
    assert counted.results == (on_device,)
    assert weighed(setup, [on_device, torch.tensor(counted.weight)])[1:] == counted[1:]


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_a_weight_must_be_a_number(weight: float) -> None:
    with pytest.raises(DataError, match="the weight of micro-batch 0 is"):
        weighed(Setup(build=tiny_gpt2), scalars(1.0, 1.0), weight)
