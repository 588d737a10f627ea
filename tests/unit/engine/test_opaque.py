"""Modules that run as written train as in one process, in any plan."""

from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine.ranks import Setup, adamw, reference, single_threaded, worst
from tests.unit.partition.odd_modules import drawing, sample, tied_kinds
from varuna.engine.graphs.compiled import Compiler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


class Padded:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return sample(index)


def test_every_plan_matches_a_plain_eager_loop() -> None:
    setup = Setup(build=tied_kinds, dataset=Padded())
    assert [tied.name for tied in setup.model.facts.tied] == ["middle.each.4.layer.weight"]
    expected = reference(setup, steps=3)
    flat = setup.losses(1, 1, steps=3)
    assert worst(flat, expected) < 1e-5
    assert setup.losses(3, 1, steps=3) == flat
    weights = setup.parameters()
    assert worst(setup.losses(2, 2, steps=3), expected) < 1e-5
    setup.compiler = Compiler("eager")  # whose sections with such a module stay as they are
    assert worst(setup.losses(2, 1, steps=3), flat) < 1e-6
    assert weights.keys() == setup.parameters().keys()


def test_what_is_drawn_does_not_depend_on_the_depth() -> None:
    setup = Setup(build=drawing, dataset=Padded(), optimizer=adamw)
    flat = setup.losses(1, 1, steps=3)
    assert setup.losses(3, 1, steps=3) == flat
