"""Submodules that capture cannot follow run as written: as one operation each, with everything else in the graph."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.partition.families import Family, Samples
from tests.unit.partition.in_turn import differences
from tests.unit.partition.odd_modules import (
    LENGTH,
    WIDTH,
    Counting,
    Fresh,
    Listing,
    Net,
    Noting,
    Overwriting,
    Packed,
    Remembering,
    Shared,
    Starting,
    Thinned,
    Whole,
    all_kinds,
    drawing,
    sample,
    sharing,
)
from varuna.checks.selfcheck import SelfCheck
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.engine.stage.section import Examples, SectionRunner, Tensors
from varuna.partition.capture.capture import Recipe
from varuna.partition.evaluation import for_evaluation
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import PartitionedModel, partition
from varuna.partition.opaque.calls import holds_opaque


@pytest.mark.nightly
def test_loss_and_gradients_are_those_of_plain_eager() -> None:
    model, found = differences(Family(all_kinds, sample))
    assert found == []
    each = [f"middle.each.{position}" for position in range(8)]
    assert sorted(model.eager) == [
        *each,
        "middle.each.8.inner",
        "middle.each.8.same",
    ]  # the innermost module that fails
    assert 1 < sum(holds_opaque(section.module.graph) for section in model.sections) < len(model.sections)


@pytest.mark.nightly
def test_a_number_of_tokens_that_is_always_the_same_is_learned() -> None:
    model, found = differences(Family(lambda: Net(Thinned), sample))
    assert found == []
    assert sorted(model.eager) == ["middle.outside", "middle.picking"]


@pytest.mark.nightly
def test_one_with_two_names_runs_as_written() -> None:
    model, found = differences(Family(lambda: Net(Shared), sample))
    assert found == []
    assert list(model.eager) == ["middle.outside"]


@pytest.mark.nightly
def test_a_tied_and_a_frozen_parameter_within() -> None:
    model, found = differences(Family(sharing, sample))
    assert found == []
    assert [tied.name for tied in model.facts.tied] == ["middle.weight"]
    assert "middle.frozen.weight" not in model.trainable


@pytest.mark.parametrize(
    ("middle", "what"),
    [
        (Counting, "middle.calls"),
        pytest.param(Remembering, "middle.mean", marks=pytest.mark.nightly),
        pytest.param(Listing, "middle.seen", marks=pytest.mark.nightly),
        pytest.param(Starting, "middle.seen", marks=pytest.mark.nightly),
        (Overwriting, "its arguments in place"),
    ],
)
def test_one_that_keeps_something_is_refused_by_name(middle: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(ModelError, match=rf"(?s)middle .*\(.*\.py:\d+\), and it writes .*{what}"):
        captured(lambda: Net(middle))


@pytest.mark.nightly
def test_what_no_other_call_reads_may_be_written() -> None:
    assert list(captured(lambda: Net(Noting)).eager) == ["middle"]


def test_one_that_gives_another_result_each_time_is_not_taken() -> None:
    with pytest.raises(ModelError, match="odd_modules"):
        captured(lambda: Net(Fresh))


@pytest.mark.nightly
def test_what_the_model_itself_does_stays_refused_at_its_line() -> None:
    line = inspect.getsourcelines(Whole.forward)[1] + 2
    with pytest.raises(ModelError, match=rf"(?s)odd_modules.py:{line}.*move this code into a submodule"):
        captured(Whole)


def captured(build: Callable[[], nn.Module], **how: Any) -> PartitionedModel:
    return partition(Recipe(build, **how), batch_of(2))


@pytest.fixture(scope="module")
def drawn() -> PartitionedModel:
    return captured(drawing)


def batch_of(size: int) -> dict[str, Tensor]:
    return SampleSource(Samples(sample), seed=0).micro_batch(range(size)).tensors


@pytest.mark.nightly
def test_draws_belong_to_the_section_and_leave_the_generators_alone(drawn: PartitionedModel) -> None:
    model = drawn
    initial = materialise(Recipe(drawing), 0)
    section = next(section for section in model.sections if holds_opaque(section.module.graph))
    leaves = tuple(initial.parameters[name].requires_grad_() for name in section.parameters)
    crossings = {crossing.name: crossing for into in model.split.crossings for crossing in into}
    runner = SectionRunner(section, Tensors(leaves, ()), crossings, seed=0)
    values = {name: torch.randn(3, LENGTH, WIDTH) for name in section.takes}
    given = values, Examples(batch_of(3), 3)
    before = random.getstate(), repr(np.random.get_state())
    forward, again, other = runner.forward(*given, 0, 0), runner.record(*given, 0, 0), runner.record(*given, 1, 0)
    assert all(map(torch.equal, forward, again.made))
    assert not all(map(torch.equal, forward, other.made))
    assert (random.getstate(), repr(np.random.get_state())) == before


@pytest.mark.nightly
def test_the_check_against_plain_pytorch_draws_alike(drawn: PartitionedModel) -> None:
    source = SampleSource(Samples(sample), seed=0)
    check = SelfCheck(Recipe(drawing), source, None, 2, True)
    found = check.compare(drawn, materialise(Recipe(drawing), 0)).errors
    assert found is not None
    assert found.gradient < 1e-5


@pytest.mark.nightly
def test_facts_are_known_without_running_it() -> None:
    model = captured(lambda: Net(Packed))
    at = next(i for i, section in enumerate(model.sections) if holds_opaque(section.module.graph))
    facts = model.facts.sections[at]
    assert facts.forward_s > 0
    assert facts.activation_bytes > LENGTH * WIDTH * 4 * 4  # gates and states of each token
    assert facts.queued_bytes == 0  # its backward is one whole
    assert captured(lambda: Net(Packed)).facts.digest == model.facts.digest


@pytest.mark.nightly
def test_evaluation_cuts_at_the_same_places(drawn: PartitionedModel) -> None:
    evaluated = for_evaluation(drawn, Recipe(drawing), batch_of(2))
    assert list(evaluated.eager) == ["middle"]
    assert len(evaluated.sections) == len(drawn.sections)


@pytest.mark.nightly
def test_half_precision_reaches_it() -> None:
    model = captured(lambda: Net(Packed), dtype=torch.bfloat16)
    assert {c.dtype for into in model.split.crossings for c in into} == {torch.bfloat16}
