"""Random models, cut at random places, have the loss and every gradient of the whole."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.checks.verified import verify
from tests.unit.partition.random_models import OPERATIONS, WEIGHTS, Instruction, Points, RandomModel
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition

INSTRUCTIONS = st.builds(
    Instruction,
    name=st.sampled_from(sorted(OPERATIONS)),
    first=st.integers(0, 3),
    second=st.integers(0, 9),
    layer=st.integers(0, WEIGHTS - 1),
)


@settings(max_examples=by_depth(2, 8), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    program=st.lists(INSTRUCTIONS, min_size=4, max_size=9).map(tuple),
    tied=st.booleans(),
    seeds=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=6),
)
def test_split_equals_whole(program: tuple[Instruction, ...], tied: bool, seeds: list[int]) -> None:
    check(program, tied, seeds)


@pytest.mark.nightly
def test_every_operation_can_be_cut_everywhere() -> None:
    names = sorted(OPERATIONS)
    for start in range(4):
        program = [Instruction(name, i % 2, 1 + i % 4, i % WEIGHTS) for i, name in enumerate(names[start::4])]
        check((*program, program[0]), True, None)


def check(program: tuple[Instruction, ...], tied: bool, seeds: Sequence[int] | None) -> None:
    """Split at ``seeds``, or wherever it is allowed, and compare with the whole."""

    def choose(flow: Flow, _: Sequence[Cost]) -> list[int]:
        allowed = [i for i, size in enumerate(flow.live_bytes()[:-1]) if size is not None]
        return sorted({allowed[seed % len(allowed)] for seed in seeds}) if seeds else allowed

    torch.manual_seed(0)
    recipe = Recipe(lambda: RandomModel(program, tied=tied))
    source = SampleSource(Points(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors, choose=choose)
    assert len(model.sections) > 1
    for size in (1, 3):
        found = verify(model, recipe, materialise(recipe, 0), source.micro_batch(range(size)).tensors)
        assert found.loss_error < 1e-6, (size, found)
        assert found.gradient_error < 1e-4, (size, found)
