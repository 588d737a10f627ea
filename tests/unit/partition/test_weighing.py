"""The weight of a micro-batch is what the loss averages over, or the run is refused."""

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import SmallLanguage, Tokens, tiny_gpt2
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture import Recipe
from varuna.partition.initialise import materialise
from varuna.partition.model import PartitionedModel, partition
from varuna.partition.weighing import check_weighing, weight_of


def prepared(recipe: Recipe, dataset: Tokens, *, counts: bool = True) -> tuple[PartitionedModel, SampleSource]:
    source = SampleSource(dataset, seed=0)
    return partition(recipe, source.micro_batch([0, 1]).tensors, count_targets=counts), source


def every_label(batch: dict[str, Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


def test_the_shifted_labels_of_hugging_face_are_counted_and_pass() -> None:
    recipe = Recipe(tiny_gpt2)
    model, source = prepared(recipe, Tokens(padded=True))
    batch = source.micro_batch([0, 1, 2]).tensors
    assert weight_of(model, None, batch, {}) == float((batch["labels"][:, 1:] != -100).sum())
    check_weighing(model, recipe, materialise(recipe, 0), source, None)


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
    with pytest.raises(ModelError, match=r"weight=fn\(batch\)"):
        check_weighing(model, recipe, materialise(recipe, 0), source, every_label)


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


def test_a_hidden_mask_is_found_out_at_the_start() -> None:
    recipe = Recipe(MaskedMean)
    model, source = prepared(recipe, Tokens(padded=True))
    assert not model.counts_targets
    with pytest.raises(ModelError, match="weighted by examples"):
        check_weighing(model, recipe, materialise(recipe, 0), source, None)
    check_weighing(model, recipe, materialise(recipe, 0), source, every_label)


def test_a_loss_that_is_a_sum_is_refused() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

        def forward(self, input_ids: Tensor) -> Tensor:
            scores: Tensor = self.head(torch.tanh(self.embed(input_ids)))
            return scores

    recipe = Recipe(
        Scores,
        loss=lambda output, batch: nn.functional.cross_entropy(
            output.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        ),
    )
    model, source = prepared(recipe, Tokens())
    with pytest.raises(ModelError, match="not the mean of its parts"):
        check_weighing(model, recipe, materialise(recipe, 0), source, None)


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
    check_weighing(model, recipe, materialise(recipe, 0), source, None)


class Contrastive(nn.Module):
    """Each sentence is to be found among the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        one = self.layer(self.embed(input_ids).mean(1))
        other = torch.tanh(self.embed(labels.clamp_min(0)).sum(1))
        likeness = one @ other.T
        return nn.functional.cross_entropy(likeness, torch.arange(likeness.shape[0]))


def test_a_loss_that_compares_samples_needs_a_fixed_micro_batch() -> None:
    recipe = Recipe(Contrastive)
    model, source = prepared(recipe, Tokens())
    initial = materialise(recipe, 0)
    with pytest.raises(ModelError, match=r"contrastive\) needs micro_batch="):
        check_weighing(model, recipe, initial, source, None)
    check_weighing(model, recipe, initial, source, None, fixed=True)


def test_a_fixed_micro_batch_excuses_no_wrong_weight_and_no_sum() -> None:
    recipe = Recipe(MaskedMean)
    model, source = prepared(recipe, Tokens(padded=True))
    with pytest.raises(ModelError, match="weighted by examples"):
        check_weighing(model, recipe, materialise(recipe, 0), source, None, fixed=True)
    recipe = Recipe(MaskedMean, loss=lambda output, batch: output * (batch["labels"] != -100).sum())
    model, source = prepared(recipe, Tokens(padded=True))
    with pytest.raises(ModelError, match="weighted by examples"):
        check_weighing(model, recipe, materialise(recipe, 0), source, None, fixed=True)
