"""Branches and loops on data that can be captured all the same, what is checked for that, and what stays refused."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import Tokens
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.partition.families import Family
from tests.unit.partition.in_turn import differences
from varuna.checks.assumptions import check_assumptions
from varuna.checks.experiment import Experiment
from varuna.core.errors import DataError, ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.graph.sample_guards import check_conditions
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition


class Layers(nn.Module):
    """An embedding, three layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(layer(x))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.layer(layer, x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Branching(Layers):
    """Goes another way for samples with a token 0."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if (input_ids == 0).any():
            labels = labels.flip(0)
        return super().forward(input_ids, labels)


class Plain(Tokens):
    """Never a token 0; but for one sample, if asked."""

    def __init__(self, odd: int | None = None) -> None:
        super().__init__()
        self.odd = odd

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["input_ids"] = sample["input_ids"].clamp(min=1)
        if index == self.odd:
            sample["input_ids"][0] = 0
        return sample


LINE = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "== 0).any()" in text)


@pytest.mark.nightly
def test_a_branch_on_the_samples_goes_as_for_the_first_of_them() -> None:
    with single_threaded():
        job = Setup(build=Branching, dataset=Plain())
        assert job.losses(2, 1, steps=2) == Setup(build=Layers, dataset=Plain()).losses(1, 1, steps=2)


class Padding(Layers):
    """A branch on samples that were written before, as in FSMT."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        input_ids.masked_fill_(input_ids == -100, 1)
        if (input_ids == 0).any():
            labels = labels.flip(0)
        return super().forward(input_ids, labels)


@pytest.mark.nightly
def test_a_branch_on_samples_that_were_written_is_looked_at_by_one_section() -> None:
    with single_threaded():
        job = Setup(build=Padding, dataset=Plain())
        assert [len(section.truths) for section in job.model.sections][:2] == [1, 0]
        assert job.losses(2, 1, steps=2) == job.losses(1, 1, steps=2)


def test_a_batch_for_which_it_goes_another_way_is_refused_by_line_and_sample() -> None:
    job = Setup(build=Branching, dataset=Plain())
    conditions = job.model.conditions
    assert conditions is not None
    assert conditions.inputs == ("input_ids",)
    batch = {key: value[None].clone() for key, value in Plain()[3].items()}
    check_conditions(conditions, batch, (3,), {})
    batch["input_ids"][0, 5] = 0
    with pytest.raises(DataError, match=rf"{Path(__file__).name}:{LINE}.* indices \[3\]"):
        check_conditions(conditions, batch, (3,), {})
    job = Setup(build=Branching, dataset=Plain(odd=7))
    with pytest.raises(DataError, match=f"{Path(__file__).name}:{LINE}"):
        job.run(1, 1, steps=8)


def test_samples_that_disagree_at_once_are_refused_at_the_start() -> None:
    job = Setup(build=Branching, dataset=Plain())
    source = SampleSource(Plain(), seed=0)
    odd = source.micro_batch([9]).indices[0]
    check_assumptions(Experiment(job.model, job.recipe, materialise(job.recipe, 0), source))
    other = SampleSource(Plain(odd), seed=0)
    for micro_batch, indices in ((1, f"{odd}"), (2, rf"\d+, {odd}")):
        with pytest.raises(DataError, match=rf"indices \[{indices}\]"):
            check_assumptions(Experiment(job.model, job.recipe, materialise(job.recipe, 0), other), micro_batch)


class Dropping(Layers):
    """LayerDrop: a branch on a random number, which no sample decides."""

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.5 else super().layer(layer, x)


class Looking(Layers):
    """A branch on what a layer made."""

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        return -x if x.sum() > 0 else super().layer(layer, x)


@pytest.mark.nightly
def test_a_branch_on_random_numbers_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    batch = SampleSource(Plain(), seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(ModelError, match=rf"{Path(__file__).name}:\d+: .*(?s:.)*Two ways out"):
        partition(Recipe(Dropping), batch)
    said = capfd.readouterr()
    assert len(said.out + said.err) < 500  # torch would print whole graphs


def test_a_branch_on_activations_that_first_samples_take_differently_is_refused_at_the_start() -> None:
    recipe, source = Recipe(Looking), SampleSource(Plain(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    with pytest.raises(DataError, match=rf"{Path(__file__).name}:\d+, .*(?s:.)*torch\.where"):
        check_assumptions(Experiment(model, recipe, materialise(recipe, 0), source))


class Routed(nn.Module):
    """Experts by name; a loop over those that got a token, and a conversion that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(16, 16) for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(torch.float32)
        flat = x.reshape(-1, 16)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        mask = nn.functional.one_hot(choice, 4).T
        out = torch.zeros_like(flat)
        for hit in (mask.sum(-1) > 0).nonzero():
            (token,) = torch.where(mask[hit[0]])
            out.index_add_(0, token, self.experts[f"expert_{hit[0]}"](flat[token]) * weight[token, None])
        return out.reshape(x.shape)


class Counting(Routed):
    """Does something for every expert that it visits."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.one_hot(self.gate(x).argmax(-1).flatten(), 4).T
        for hit in (mask.sum(-1) > 0).nonzero().squeeze(-1).tolist():
            x = x * (1 + hit)
        scored: Tensor = x + self.gate(x).sum(-1, keepdim=True)
        return scored


class Experts(Layers):
    kind: Any = Routed

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(2))


class CountingExperts(Experts):
    kind = Counting


@pytest.mark.nightly
def test_a_loop_over_the_experts_that_were_hit_visits_all_of_them() -> None:
    model, found = differences(Family(Experts))
    assert found == []
    assert model.visits_all
    recipe = Recipe(Experts)
    check_assumptions(Experiment(model, recipe, materialise(recipe, 0), SampleSource(Plain(), seed=0)))


@pytest.mark.nightly
def test_a_loop_that_minds_how_many_it_visits_is_refused() -> None:
    recipe, source = Recipe(CountingExperts), SampleSource(Plain(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    with pytest.raises(ModelError, match="places where a mask is true"):
        check_assumptions(Experiment(model, recipe, materialise(recipe, 0), source))


class Asking(Layers):
    """Breaks where it is told that it is compiled, as some models do."""

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else x.new_ones(x.shape[0])
        return super().layer(layer, x) * mask[:, None, None]  # type: ignore[index]


@pytest.mark.nightly
def test_a_path_for_compilation_that_fails_gives_way_to_that_of_eager() -> None:
    assert differences(Family(Asking))[1] == []


@pytest.mark.parametrize(("asks", "attempts"), [(False, 3), (True, 5)])
def test_the_path_of_eager_is_tried_where_a_model_asks_which_it_is(
    monkeypatch: pytest.MonkeyPatch, asks: bool, attempts: int
) -> None:
    """With what the code says, with the samples, and to see which module is in the way: that one always as eager."""
    tried = []

    def attempt(*_: object, **__: object) -> None:
        tried.append(torch.compiler.is_compiling() if asks else None)
        raise ValueError("no way")

    monkeypatch.setattr(torch.export, "export", attempt)
    with pytest.raises(ModelError, match="no way"):
        partition(Recipe(Layers), SampleSource(Plain(), seed=0).micro_batch([0, 1]).tensors)
    assert len(tried) == attempts


class Counted(Layers):
    """Makes a Python number of the number of samples."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids, labels) + torch.arange(int(input_ids.shape[0])).sum()


class Contrasted(Layers):
    """As CLIP does."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        one, other = self.embed(input_ids).mean(1), self.embed(labels).mean(1)
        return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))


def test_the_length_of_a_tensor_is_no_one_number() -> None:
    batch = SampleSource(Plain(), seed=0).micro_batch([0, 1]).tensors
    assert not partition(Recipe(Contrasted), batch).eager, "or all of it would run as written, in one section"


@lru_cache
def halves(size: int) -> Tensor:
    return torch.full((size, 1, 1), 0.5)


class Remembered(Layers):
    """As DETR does for its positions."""

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        known: dict[int, Tensor] = {}
        known[x.shape[0]] = halves(x.shape[0])
        return super().layer(layer, x) * known[x.shape[0]]


def test_a_size_may_be_the_key_of_a_cache() -> None:
    model, found = differences(Family(Remembered))
    assert found == []
    assert not model.eager


@pytest.mark.nightly
def test_a_model_for_one_number_of_samples_is_told_what_does_that() -> None:
    batch = SampleSource(Plain(), seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(ModelError, match=rf"{Path(__file__).name}:\d+: int\(x"):
        partition(Recipe(Counted), batch)
