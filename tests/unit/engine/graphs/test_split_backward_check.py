"""B in two halves gives the bits of B whole, for every way in which a model uses its parameters."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth, nightly
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, adamw, dropping, tiny_llama
from tests.unit.engine.ranks import Setup
from tests.unit.testing.test_length_variants import LENGTHS
from tests.unit.testing.test_length_variants import setup as of_lengths
from varuna.core.plan import Pipeline, Plan
from varuna.engine.graphs import split_backward_check
from varuna.engine.graphs.run_once import SectionOutcome, outcome
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.stored import initial_states
from varuna.partition.cut.split_backward import retarget
from varuna.partition.model import partition


class Reused(nn.Module):
    """One layer applied four times, as ALBERT does, and two layers that share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layer = nn.Linear(8, 8)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.bias = self.one.bias
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(4):
            x = x + torch.tanh(self.layer(x))
        x = x + self.one(x) * self.other(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Shared(nn.Module):
    """A bias that a norm uses too, a frozen layer, a product with a bare parameter, and one of a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.norm, self.layer, self.frozen = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm.bias = self.layer.bias
        self.frozen.requires_grad_(False)
        self.matrix, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(input_ids))
        x = self.frozen(self.layer(x)) @ self.matrix @ self.other.t()
        return nn.functional.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten())


def whole_stage(setup: Setup) -> Stage:
    sections = len(setup.model.sections)
    plan = Plan(micro_batch=2, global_batch=6, pipelines=(Pipeline(bounds=(0, sections), stash_limits=(1,)),))
    job = setup.job()
    return Stage(job, plan, 0, initial_states(setup.model, range(sections), setup.beginning.parameters, job.buffers), 0)


def gradients(setup: Setup, stage: Stage, *, split: bool, keep: int = 0) -> list[Tensor]:
    """Accumulators after three micro-batches; with ``split``, W's come after all I's."""
    stage.clear_gradients()
    lefts = []
    loss = setup.model.sections[-1].makes[0]
    for micro_batch in range(3):
        first = 2 * micro_batch
        examples = Examples(setup.source.micro_batch([first, first + 1]).tensors, 2)
        _, _, kept, _ = stage.forward({}, examples, 0, micro_batch, keep=keep, split=split)
        tapes = [*stage.record({}, examples, 0, micro_batch, keep=keep, split=split), *kept]
        assert len(tapes) == len(stage.sections)
        if split:
            lefts.append(stage.input_backward(tapes, {loss: torch.ones((), dtype=tapes[-1].made[0].dtype)})[1])
        else:
            stage.backward(tapes, {loss: torch.ones((), dtype=tapes[-1].made[0].dtype)}, lambda section: None)
    for left in lefts:
        done: list[int] = []
        stage.weight_backward(left, done.append)
        assert done == list(reversed(stage.sections))
    return [bucket.flat.clone() for bucket in stage.buckets.values()]


@pytest.mark.parametrize(
    "build",
    [
        SmallLanguage,
        Reused,
        *nightly(Shared, dropping, tiny_llama),
    ],
)
def test_both_halves_give_the_bits_of_a_whole_backward(build: Callable[[], nn.Module]) -> None:
    setup = Setup(build=build, dataset=Tokens(padded=True))
    stage = whole_stage(setup)
    whole = gradients(setup, stage, split=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(setup, stage, split=True), whole, strict=True))
    assert all(stage.job.halves._exact.values())
    deferred = [section for section, module in stage.job.halves._retargeted.items() if module is not None]
    assert deferred


@pytest.mark.nightly
def test_both_halves_agree_in_half_precision() -> None:
    setup = Setup(build=Dropping, dataset=Tokens(padded=True), precision="bf16")
    stage = whole_stage(setup)
    whole = gradients(setup, stage, split=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(setup, stage, split=True), whole, strict=True))
    assert all(stage.job.halves._exact.values())


@pytest.mark.nightly
def test_every_declared_length_has_halves_of_its_own() -> None:
    def adjusted(plan: Plan) -> Plan:
        return plan.with_each_pipeline(split_last=6, kept=(1, 1))

    split = of_lengths(policy="adaptive", adjusted=adjusted)
    assert split.losses(2, 1, by_depth(2, 3)) == of_lengths().losses(1, 1, by_depth(2, 3))
    halves = [session.current.stage.job.halves for session in split.finished if session.current is not None][1]
    assert len([module for module in halves._retargeted.values() if module is not None]) >= len(LENGTHS)
    assert all(halves._exact.values())


@pytest.mark.parametrize("split", [False, True])
def test_keeping_some_sections_changes_no_bit(split: bool) -> None:
    setup = Setup(build=Dropping, dataset=Tokens(padded=True))
    stage = whole_stage(setup)
    none = gradients(setup, stage, split=False)
    for keep in (1, 2, len(stage.sections)):
        assert all(
            torch.equal(a, b) for a, b in zip(gradients(setup, stage, split=split, keep=keep), none, strict=True)
        )


def in_one_section(build: Callable[[], nn.Module]) -> Setup:
    setup = Setup(build=build, dataset=Tokens(padded=True))
    batch = setup.source.micro_batch(range(2)).tensors
    setup.model = partition(setup.recipe, batch, optimizer=adamw, choose=lambda flow, costs: [])
    return setup


@pytest.mark.parametrize("build", [Shared, *nightly(SmallLanguage, Reused)])
def test_uses_of_a_parameter_within_one_section_are_summed_as_autograd_does(build: Callable[[], nn.Module]) -> None:
    setup = in_one_section(build)
    stage = whole_stage(setup)
    [whole] = gradients(setup, stage, split=False)
    [halves] = gradients(setup, stage, split=True)
    assert torch.equal(whole, halves)
    assert all(stage.job.halves._exact.values())


def test_a_parameter_is_deferred_only_where_all_its_uses_are() -> None:
    setup = in_one_section(Shared)
    module = retarget(setup.model.sections[0], setup.model.trainable, setup.model.shapes)
    assert module is not None
    deferred = "".join(line for line in module.code.splitlines() if "split_backward_" in line)
    assert "p_model_matrix" in deferred
    for name in ("layer_weight", "frozen", "other", "embed"):  # its bias is a norm's too; frozen; transposed twice
        assert name not in deferred
    apart = Setup(build=Shared).model  # where the norm is in another section, it has a leaf of its own
    modules = [retarget(section, apart.trainable, apart.shapes) for section in apart.sections]
    assert "layer_weight" in "".join(module.code for module in modules if module is not None)


def test_a_section_whose_halves_do_not_agree_is_never_split(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(build=SmallLanguage)
    stage = whole_stage(setup)
    whole = gradients(setup, stage, split=False)
    monkeypatch.setattr(
        "varuna.partition.cut.split_backward.gradient_of_bias", lambda taken, gradient: gradient.sum((0, 1)) * 2
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients(setup, stage, split=True), whole, strict=True))
    assert not all(stage.job.halves._exact.values())


def test_gradients_of_one_run_at_a_time_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[weakref.ref[Tensor]]] = []

    def seen(*arguments: Any, **options: Any) -> SectionOutcome:
        assert not any(ref() is not None for refs in made for ref in refs)
        run = outcome(*arguments, **options)
        made.append([weakref.ref(gradient) for gradient in run.gradients if gradient is not None])
        return run

    monkeypatch.setattr(split_backward_check, "outcome", seen)
    setup = Setup(build=SmallLanguage)
    gradients(setup, whole_stage(setup), split=True)
    assert len(made) >= 2
    assert all(made)
