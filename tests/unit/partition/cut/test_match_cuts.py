"""Sections of one graph, found again in another graph of the same model."""

import pytest
import torch
from torch import Tensor, nn

from varuna.core.errors import ModelError
from varuna.partition.capture.capture import Recipe
from varuna.partition.evaluation import for_evaluation
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.model import PartitionedModel, partition

BATCH = {"x": torch.ones(2, 4)}


def cut_everywhere(flow: Flow, _: list[Cost]) -> list[int]:
    return [i for i, size in enumerate(flow.live_bytes()[:-1]) if size is not None]


def both(model: type[nn.Module]) -> tuple[PartitionedModel, PartitionedModel]:
    recipe = Recipe(model)
    trained = partition(recipe, BATCH, choose=cut_everywhere)  # type: ignore[arg-type]
    return trained, for_evaluation(trained, recipe, BATCH)


class DropoutAtBothEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)  # the first section: nothing is left of it in evaluation
        x = self.drop(torch.tanh(self.one(x)))
        loss: Tensor = self.drop(self.two(x)).square().mean()
        return loss


def test_a_section_of_dropout_alone_is_empty_in_evaluation() -> None:
    trained, evaluated = both(DropoutAtBothEnds)
    assert len(evaluated.sections) == len(trained.sections)
    for one, two in zip(trained.sections, evaluated.sections, strict=True):
        assert set(two.parameters) == set(one.parameters)
    drawing = [section.index for section in trained.sections if section.random]
    assert drawing[0] == 0
    assert not evaluated.sections[0].makes
    assert not any(section.random for section in evaluated.sections)


class OtherOrder(nn.Module):
    """In evaluation its modules run the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.one, self.two) if self.training else (self.two, self.one)
        loss: Tensor = second(torch.tanh(first(x))).square().mean()
        return loss


def test_a_model_that_computes_in_another_order_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ModelError, match=r"their parameters are used in another order\. .*trainer\.export"):
        both(OtherOrder)


class MoreInEvaluation(nn.Module):
    """Evaluation uses a parameter that training does not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        return (x if self.training else self.two(x)).square().mean()


def test_a_parameter_that_training_does_not_use_is_named() -> None:
    with pytest.raises(ModelError, match=r"no section has all parameters that .* uses: two\.(weight|bias)"):
        both(MoreInEvaluation)
