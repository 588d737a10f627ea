"""The weight of a micro-batch is what the loss averages over, or the run is refused."""

import random

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import SmallLanguage, Tokens, tiny_gpt2
from tests.unit.engine.ranks import Setup
from varuna.checks.experiment import Experiment
from varuna.checks.loss_weight import check_weighing
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.batch_weight import weight_of
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import PartitionedModel, partition


def prepared(recipe: Recipe, dataset: Tokens, *, counts: bool = True) -> tuple[PartitionedModel, SampleSource]:
    source = SampleSource(dataset, seed=0)
    return partition(recipe, source.micro_batch([0, 1]).tensors, count_targets=counts), source


def every_label(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


def test_the_shifted_labels_of_hugging_face_are_counted_and_pass() -> None:
    setup = Setup(build=tiny_gpt2, dataset=Tokens(padded=True))
    model, recipe, source = setup.model, setup.recipe, setup.source
    batch = source.micro_batch([0, 1, 2]).tensors
    assert weight_of(model, None, batch, {}) == float((batch["labels"][:, 1:] != -100).sum())
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


def test_a_wrong_weight_is_refused_with_the_remedy() -> None:
    class Shifted(SmallLanguage):
        """Counts one target less per sample than there are labels, as models of transformers do."""

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return super().forward(input_ids[:, :-1], labels[:, 1:])

    class RightPadded(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            sample = super().__getitem__(index)
            sample["labels"][16 - index % 13 :] = -100
            return sample

    recipe = Recipe(Shifted)
    model, source = prepared(recipe, RightPadded(), counts=False)
    with pytest.raises(ModelError, match="or leave weight= out"):
        check_weighing(Experiment(model, recipe, materialise(recipe, 0), source, every_label))


class MaskedMean(nn.Module):
    """Averages over unmasked places by hand: no cross-entropy says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        each = nn.functional.cross_entropy(logits.transpose(1, 2), labels.clamp_min(0), reduction="none")
        mask = (labels != -100).float()
        return (each * mask).sum() / mask.sum()


@pytest.mark.nightly
def test_a_mean_by_hand_is_weighed_by_its_mask() -> None:
    recipe = Recipe(MaskedMean)
    model, source = prepared(recipe, Tokens(padded=True))
    assert model.whole is not None
    assert not model.mixing
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


@pytest.mark.nightly
def test_a_weight_of_the_user_replaces_what_the_loss_says() -> None:
    recipe = Recipe(MaskedMean)
    model, source = prepared(recipe, Tokens(padded=True), counts=False)
    assert model.whole is None
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source, every_label))
    with pytest.raises(ModelError, match=r"or leave weight= out"):
        check_weighing(Experiment(model, recipe, materialise(recipe, 0), source, lambda batch: len(batch["labels"])))


def test_class_weights_count_as_the_mean_divides_by_them() -> None:
    class Weighted(nn.Module):
        per_class: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 64)
            self.register_buffer("per_class", torch.linspace(0.5, 2.0, 64))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.embed(input_ids)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.per_class)

    recipe = Recipe(Weighted)
    model, source = prepared(recipe, Tokens(padded=True))
    assert model.counts_targets
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


class Unmasked(SmallLanguage):
    """Leaves its mask out where a batch pads nothing, and then computes something else."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        seen = (labels != -100).float()
        if not torch.compiler.is_compiling() and bool(seen.all()):
            seen = seen * 1.5
        x = self.head(self.embed(input_ids) * seen[..., None])
        return nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


class Some(Tokens):
    """Pads every other sample."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["labels"][16 - 3 * (index % 2) :] = -100
        return sample


@pytest.mark.nightly
def test_a_model_that_goes_another_way_for_a_whole_batch_is_told_so() -> None:
    recipe = Recipe(Unmasked)
    model, source = prepared(recipe, Some())
    with pytest.raises(ModelError, match=r"for a sample alone than .* \(dataset indices \["):
        check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


class Wrong(SmallLanguage):
    """Its targets are ignored where a threshold on activations says so: nobody can count them before they are run."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        targets = labels.masked_fill(x.detach().mean(-1) > 0, -100)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_the_check_with_samples_finds_what_the_graph_does_not_say_and_leaves_the_model_as_it_was() -> None:
    recipe = Recipe(Wrong)
    model, source = prepared(recipe, Tokens())
    initial = materialise(recipe, 0)
    before = {name: value.clone() for name, value in initial.parameters.items()}
    with pytest.raises(ModelError, match="weighted by examples"):
        check_weighing(Experiment(model, recipe, initial, source))
    assert all(torch.equal(value, before[name]) for name, value in initial.parameters.items())


class Noisy(nn.Module):
    """A variational autoencoder with dropout: another draw each time, and a right mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mean, self.spread = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.embed(input_ids))
        mean, spread = self.mean(x), self.spread(x)
        x = mean + torch.randn_like(mean) * torch.exp(spread / 2)
        divergence: Tensor = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1).mean()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + divergence


@pytest.mark.nightly
def test_draws_of_the_model_are_no_error_of_its_weighing() -> None:
    recipe = Recipe(Noisy)
    model, source = prepared(recipe, Tokens(padded=True))
    state = torch.random.get_rng_state()
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.nightly
def test_a_model_that_returns_something_else_in_evaluation_is_weighed_in_training() -> None:
    class Auxiliary(SmallLanguage):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            if not self.training:
                raise AttributeError("no loss in evaluation")
            return super().forward(input_ids, labels)

    recipe = Recipe(Auxiliary)
    model, source = prepared(recipe, Tokens(padded=True))
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


@pytest.mark.nightly
def test_rounding_that_a_deep_model_amplifies_is_no_error() -> None:
    class Steep(SmallLanguage):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for _ in range(3):
                for layer in self.layers:
                    x = torch.sin(8 * layer(x))
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    recipe = Recipe(Steep)
    model, source = prepared(recipe, Tokens(padded=True))
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))


def test_a_random_loss_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = random.Random(0)
    recipe = Recipe(SmallLanguage, loss=lambda output, batch: output * drawn.random())
    model, source = prepared(recipe, Tokens(padded=True))
    check_weighing(Experiment(model, recipe, materialise(recipe, 0), source))
    assert "differs each time" in capsys.readouterr().err
