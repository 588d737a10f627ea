"""Models and graphs that capture accepts, keeps and refuses."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import SmallLanguage, Tokens, adamw, tiny_gpt2
from tests.unit.engine.ranks import Setup
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import PartitionedModel, partition


def batch_of(dataset: Any) -> dict[str, Tensor]:
    return SampleSource(dataset, seed=0).micro_batch([0, 1]).tensors


@pytest.fixture(scope="module")
def gpt2() -> PartitionedModel:
    return Setup(build=tiny_gpt2).model  # captured once for many tests


@pytest.mark.nightly
def test_gpt2_is_cut_along_the_residual_stream(gpt2: PartitionedModel) -> None:
    model = gpt2
    crossing = [[c.shape(5) for c in into] for into in model.split.crossings[1:]]
    assert crossing == [[(5, 16, 32)]] * len(crossing)
    assert len(model.sections) >= 2 * 2


def test_inputs_go_to_the_sections_that_use_them_and_masks_are_rebuilt(gpt2: PartitionedModel) -> None:
    model = gpt2
    assert [section.inputs for section in model.sections[1:-1]] == [()] * (len(model.sections) - 2)
    assert model.sections[0].inputs == ("input_ids",)
    assert model.sections[-1].inputs == ("labels",)


def test_the_tied_embedding_is_found_and_named_once(gpt2: PartitionedModel) -> None:
    facts = gpt2.facts
    assert [tied.name for tied in facts.tied] == ["transformer.wte.weight"]
    assert facts.tied[0].sections == (0, len(facts.sections) - 1)
    assert facts.tied[0].owner == 0


class Untied(SmallLanguage):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)


def test_an_untied_model_has_nothing_tied_and_keeps_its_names() -> None:
    model = partition(Recipe(Untied), batch_of(Tokens()))
    assert model.facts.tied == ()
    assert set(model.shapes) == {name for name, _ in Untied().named_parameters()}


def test_left_over_cache_tensors_are_folded_away(gpt2: PartitionedModel) -> None:
    code = "".join(section.module.code for section in gpt2.sections)
    assert "aten.cat" not in code
    assert "lift_fresh" not in code


@pytest.mark.nightly
def test_two_captures_agree_to_the_digest() -> None:
    one, other = (partition(Recipe(SmallLanguage), batch_of(Tokens()), optimizer=adamw) for _ in range(2))
    assert one.facts == other.facts


@pytest.mark.nightly
def test_models_that_differ_only_under_autocast_have_other_digests() -> None:
    class Autocast(nn.Module):
        def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.inner, self.activation = nn.Linear(4, 4), activation

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.activation(self.inner(x))
            return x.float().mean()

    batch = {"x": torch.ones(2, 4)}
    one, two, again = (
        partition(Recipe(partial(Autocast, activation)), batch).facts.digest
        for activation in (torch.relu, torch.sigmoid, torch.relu)
    )
    assert one == again != two


def test_a_wished_number_of_cut_points_is_kept_or_refused() -> None:
    assert len(partition(Recipe(SmallLanguage), batch_of(Tokens()), cut_points=3).sections) == 4
    with pytest.raises(ModelError, match=r"only \d+ cut points exist"):
        partition(Recipe(SmallLanguage), batch_of(Tokens()), cut_points=10_000)


def test_optimizer_state_is_counted_without_allocating_it(gpt2: PartitionedModel) -> None:
    section = gpt2.facts.sections[1]
    assert 2 * section.trainable_bytes <= section.optimizer_bytes < 2.2 * section.trainable_bytes
    plain = partition(Recipe(SmallLanguage), batch_of(Tokens()), optimizer=lambda n: torch.optim.SGD([p for _, p in n]))
    assert plain.facts.sections[1].optimizer_bytes == 0


class Regression(nn.Module):
    """Plain module whose loss is given from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


class Points:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x.sum()[None]}


def test_a_loss_function_reads_what_the_model_does_not() -> None:
    recipe = Recipe(Regression, loss=lambda output, batch: nn.functional.mse_loss(output, batch["y"]))
    model = partition(recipe, batch_of(Points()))
    assert not model.counts_targets
    assert model.sections[-1].inputs == ("y",)


def test_a_model_that_returns_no_loss_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"loss=fn\(output, batch\)"):
        partition(Recipe(Regression), batch_of(Points()))


def error(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


@pytest.mark.parametrize(
    "returned",
    [
        lambda out, batch: (error(out, batch), {"examples": 1}),
        lambda out, batch: {"loss": error(out, batch), "mean": out.mean()},
        lambda out, batch: error(out, batch)[None],
    ],
    ids=["with numbers to log", "by name", "in a row of one"],
)
def test_what_loss_returns_may_contain_it(returned: Any) -> None:
    expected = partition(Recipe(Regression, loss=error), batch_of(Points()))
    found = partition(Recipe(Regression, loss=returned), batch_of(Points()))
    assert [section.parameters for section in found.sections] == [each.parameters for each in expected.sections]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda out, batch: (out.mean(), out.sum()), "tuple"),
        (lambda out, batch: {"first": out.mean(), "second": out.sum()}, "dict"),
        (lambda out, batch: (out - batch["y"]).square(), "a tensor of shape"),
        (lambda out, batch: None, "NoneType"),
        (lambda out, batch: out.mean().item(), "Float"),
    ],
    ids=["two", "terms by name", "rows", "nothing", "a number"],
)
def test_what_loss_returns_is_named_if_it_is_no_loss(returned: Any, found: str) -> None:
    with pytest.raises(ModelError, match=rf"^loss= must return a scalar loss.*found {found}.*all terms together"):
        partition(Recipe(Regression, loss=returned), batch_of(Points()))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda out: out.reshape(1, 1), r"a tensor of shape \(1, 1\)"),
        pytest.param(lambda _: 3, "a int", marks=pytest.mark.nightly),
    ],
)
def test_a_metric_that_is_no_sum_is_named(value: Callable[[Any], Any], found: str) -> None:
    with pytest.raises(ModelError, match=rf"metrics= must return .* but 'odd' is {found}\. Sum it"):
        partition(Recipe(SmallLanguage, metrics=lambda out, _: {"odd": value(out)}), batch_of(Tokens()))


def test_a_model_that_cannot_be_built_hears_how_it_is_built() -> None:
    def missing() -> nn.Module:
        raise FileNotFoundError("weights.bin")

    with pytest.raises(ModelError, match=r"FileNotFoundError: weights\.bin\nVaruna calls model= .*no \.cuda\(\)"):
        partition(Recipe(missing), batch_of(Tokens()))


@pytest.mark.nightly
@pytest.mark.filterwarnings("error")
def test_an_lstm_is_captured_without_a_warning_about_its_own_list() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(64, 8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (self.lstm(self.embed(input_ids))[0].mean((1, 2)) - labels[:, 0]).square().mean()
            return loss

    assert partition(Recipe(Recurrent), batch_of(Tokens())).sections


def test_missing_inputs_are_named() -> None:
    class Other(Points):
        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"features": torch.zeros(4)}

    with pytest.raises(ModelError, match=r"forward needs x, but a sample has features"):
        partition(Recipe(Regression), batch_of(Other()))


def test_a_failing_constructor_names_the_line() -> None:
    def build() -> nn.Module:
        raise RuntimeError("no such size")

    with pytest.raises(ModelError, match=r"test_capture\.py:\d+: RuntimeError: no such size"):
        partition(Recipe(build), batch_of(Points()))
