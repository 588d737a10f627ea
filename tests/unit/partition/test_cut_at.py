"""The user names the modules at which sections begin."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.checks.verified import verify
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.partition.families import NAMED, Samples
from varuna.core.errors import ModelError, UsageError
from varuna.data.samples import SampleSource
from varuna.job.spec import JobSpec
from varuna.partition.capture.capture import Recipe
from varuna.partition.cut_at import chooser
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import CutChooser, PartitionedModel, partition
from varuna.trainer import Trainer


def cut(recipe: Recipe, cut_at: list[str], dataset: Any = None) -> PartitionedModel:
    batch = SampleSource(dataset or Tokens(), seed=0).micro_batch([0, 1]).tensors
    return partition(recipe, batch, choose=chooser(cut_at))


def choose_at(*names: str) -> CutChooser:
    return chooser(names)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + torch.tanh(self.inner(x))
        return made


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 8)
        self.h = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.wte(input_ids)
        for layer in self.h:
            x = layer(x)
        return x


class Named(nn.Module):
    """With the names of GPT-2's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.lm_head = Stack(), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.lm_head(self.transformer(input_ids)).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def named() -> tuple[PartitionedModel, Flow]:
    """Cut in front of its second and third layer, and as it is when the cuts are chosen."""
    seen: list[Flow] = []

    def look(flow: Flow, costs: Sequence[Cost]) -> list[int]:
        seen.append(flow)
        return choose(flow, costs)

    choose = choose_at("transformer.h.2", "transformer.h.1")
    batch = SampleSource(Tokens(), seed=0).micro_batch([0, 1]).tensors
    return partition(Recipe(Named), batch, choose=look), seen[0]


def test_sections_begin_where_the_named_modules_do(named: tuple[PartitionedModel, Flow]) -> None:
    model, _ = named
    assert [section.label for section in model.sections] == ["transformer.h.0", "transformer.h.1", "output"]
    first = [{name.split(".")[2] for name in section.parameters if ".h." in name} for section in model.sections]
    assert first == [{"0"}, {"1"}, {"2"}]
    assert [[c.shape(3) for c in into] for into in model.split.crossings] == [[], [(3, 16, 8)], [(3, 16, 8)]]


@pytest.mark.parametrize(
    ("family", "cut_at"),
    [
        pytest.param("t5", ["encoder.block.1", "decoder.block.0.layer.2", "lm_head"], marks=pytest.mark.nightly),
        ("sequential", ["2.0", "4"]),
        pytest.param("unet", ["down.1", "middle", "up.2"], marks=pytest.mark.nightly),
        pytest.param("albert", ["albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"], marks=pytest.mark.nightly),
    ],
)
def test_models_of_many_kinds_still_compute_the_same(family: str, cut_at: list[str]) -> None:
    known = NAMED[family]
    recipe, dataset = Recipe(known.build, known.loss), Samples(known.sample)
    model = cut(recipe, cut_at, dataset)
    batch = SampleSource(dataset, seed=0).micro_batch([0, 1, 2]).tensors
    found = verify(model, recipe, materialise(recipe, 0), batch)
    assert found.loss_error < 1e-6
    assert found.gradient_error < 1e-5
    calls = 2 if family == "albert" else 1  # one shared layer, entered twice
    assert len(model.sections) == len(cut_at) * calls + 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("transformer.h.9", r"a module of this name\. Similar names .*transformer\.h\.1"),
        ("h.2", r"a module of this name\. Similar names .*: transformer\.h\.2"),
        ("transformer.h", r"holds others .*: transformer\.h\.0, transformer\.h\.1, transformer\.h\.2\."),
        ("transformer.wte", r"nothing runs before this module"),
        ("model.transformer.h.1", r"a module of this name\. Similar names .*: transformer\.h\.1"),
    ],
)
def test_wrong_names_are_refused_with_near_ones(named: tuple[PartitionedModel, Flow], path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_at("transformer.h.1", path)(named[1], [])


class Written(nn.Module):
    """Between its first two layers a tensor is alive that is written in place later."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) * 2
        y = self.layers[0](torch.ones_like(x))
        x.add_(self.layers[1](y))
        return nn.functional.mse_loss(self.layers[2](x), labels.unsqueeze(-1).float().expand(-1, -1, 8))


def test_a_module_in_the_life_of_a_written_tensor_is_refused_with_those_that_can_be_cut() -> None:
    with pytest.raises(ModelError, match=r"layers\.1.*written in place.*can be cut at: layers\.2\."):
        cut(Recipe(Written), ["layers.1"])


@pytest.mark.nightly
def test_cuts_are_a_number_or_names() -> None:
    for cut, sections in ((["layers.1"], 2), (3, 4)):
        assert len(JobSpec(SmallLanguage, Tokens(), adamw, 4, cut=cut).partitioned.sections) == sections
    for wrong in ("layers.1", [3], 1.5):
        with pytest.raises(UsageError, match="number of cut-points or a list of names of modules"):
            Trainer(SmallLanguage, Tokens(), adamw, 4, cut=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cut=\[\] names no modules; leave it out"):
        Trainer(SmallLanguage, Tokens(), adamw, 4, cut=[])
