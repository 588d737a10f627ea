"""A detector's criterion, made in ``forward`` and given a list with a dict for each picture, runs as written."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.unit.engine.models import adamw
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.core.errors import ModelError
from varuna.job.options import Loss
from varuna.partition.evaluation import for_evaluation
from varuna.partition.opaque.each_sample import LoopsOverSamplesError, gathered, listed, spread, whole_of
from varuna.trainer import Trainer


class Pictures:
    """Numbers, and two points to be found in each."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        return {
            "pixels": torch.randn(6, generator=draws),
            "points": torch.rand(2, 2, generator=draws),
            "kinds": torch.randint(0, 3, (2,), generator=draws),
        }


class Matching(nn.Module):
    """Each point of a picture belongs to the nearest query, as NumPy finds it."""

    @torch.no_grad()
    def forward(self, found: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> list[Tensor]:
        pairs = [(found["points"][i], targets[i]["points"]) for i in range(len(targets))]  # a number, for Python
        costs = [torch.cdist(one, other) for one, other in pairs]
        return [torch.as_tensor(np.argmin(cost.numpy(), axis=0)) for cost in costs]


class Criterion(nn.Module):
    weights: Tensor

    def __init__(self, rarely: float) -> None:
        super().__init__()
        self.matching = Matching()
        self.register_buffer("weights", torch.tensor([1.0, 1.0, rarely]))

    def forward(self, found: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if (found["points"] < 0).any():
            raise ValueError("points lie in the picture")
        rows = self.matching(found, targets)
        pairs = list(zip(found["points"], found["kinds"], rows, targets, strict=True))
        apart = torch.stack([(points[row] - target["points"]).abs().sum() for points, _, row, target in pairs])
        each = [nn.functional.cross_entropy(kinds[row], t["kinds"], self.weights) for _, kinds, row, t in pairs]
        return {"points": apart.sum() / len(targets), "kinds": torch.stack(each).mean()}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.points, self.kinds = nn.Linear(6, 8), nn.Linear(6, 12)

    def forward(self, pixels: Tensor, points: Tensor, kinds: Tensor) -> Tensor:
        for layer in self.layers:
            pixels = pixels + torch.tanh(layer(pixels))
        found = {
            "points": self.points(pixels).sigmoid().unflatten(1, (4, 2)),
            "kinds": self.kinds(pixels).unflatten(1, (4, 3)),
        }
        told = zip(points.unbind(), kinds.unbind(), strict=True)
        losses: dict[str, Tensor] = Criterion(0.5).train(self.training)(
            found, [{"points": each, "kinds": kind} for each, kind in told]
        )
        return losses["points"] + 0.1 * losses["kinds"]


@pytest.mark.nightly
def test_a_criterion_that_forward_makes_runs_as_written_in_any_plan() -> None:
    with single_threaded():
        setup = Setup(build=Detector, dataset=Pictures(), clip=None)
        assert list(setup.model.eager) == [f"{__name__}:Criterion"]
        assert len(setup.model.sections) > 3
        one = setup.losses(1, 1, 2)
        assert setup.losses(3, 1, 2) == one
        assert worst(one, reference(setup, 2)) < 2e-6
        rows = [Pictures()[index] for index in range(2)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        assert list(for_evaluation(setup.model, setup.recipe, batch).eager) == list(setup.model.eager)


@pytest.mark.nightly
def test_what_it_does_to_the_batch_is_for_the_user_to_say() -> None:
    with single_threaded():
        with pytest.raises(ModelError, match="per_micro_batch=True"):
            next(iter(Trainer(Detector, Pictures(), adamw, 8, device="cpu").steps(1)))
        allowed = Trainer(Detector, Pictures(), adamw, 8, micro_batch=2, loss=Loss(per_micro_batch=True), device="cpu")
        assert len(list(allowed.steps(1))) == 1


def test_a_list_of_samples_is_the_whole_tensor_on_the_way_and_a_list_again() -> None:
    whole = torch.arange(6).view(3, 2)
    one, two = listed(whole)
    given = ({"x": whole}, [{"points": one}, {"points": two}], listed(whole), [1])
    leaves, structure = tree_flatten(gathered(given))
    assert [leaf is whole for leaf in leaves] == [True, True, True, False]
    same, dicts, alone, rest = spread(tree_unflatten(leaves, structure))
    assert same["x"] is whole
    assert rest == [1]
    assert [each["points"].tolist() for each in dicts] == [each.tolist() for each in alone] == whole.tolist()
    assert isinstance(alone, tuple)
    mixed = [{"points": one, "number": 0}, {"points": two, "number": 1}]  # a number would be that of all
    assert gathered(mixed)[0]["number"] == 0


def test_what_a_loop_does_to_each_sample_is_done_to_all() -> None:
    whole = torch.arange(12.0).view(3, 2, 2)
    found: list[Any] = [(each[0] * 2 + each[1]).sigmoid().view(1, 2) for each in cast(Any, listed(whole))]
    expected = [(each[0] * 2 + each[1]).sigmoid().view(1, 2) for each in whole]
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_a_loop_must_treat_all_samples_alike_and_apart() -> None:
    def passed_on(elements: Any) -> Any:
        return [elements[0], elements[1] + elements[0]]

    def counted(elements: Any) -> Any:
        return [each * number for number, each in enumerate(elements)]

    def first_one_other(elements: Any) -> Any:
        return [elements[0] * 2, *elements[1:]]

    def written(elements: Any) -> Any:
        for each in elements:
            each += 1
        return elements

    def normed(elements: Any) -> Any:
        return [each / each.norm() for each in elements]

    for loop in (passed_on, counted, first_one_other, written, normed):
        with pytest.raises(LoopsOverSamplesError):
            torch.stack(loop(listed(torch.ones(3, 2))))
    assert whole_of(listed(torch.ones(3, 2))[:1]) is None
