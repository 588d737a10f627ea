"""Lists of the samples' features that are put together again, as vision-language models make, are no loops."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.engine.models import adamw
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition
from varuna.trainer import Trainer

IMAGE = 63


class Captions:
    """Tokens of which two stand for a picture's two patches, and the picture."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        ids = torch.randint(0, IMAGE, (8,), generator=draws)
        labels = ids.clone()
        ids[1 + index % 4 : 3 + index % 4] = IMAGE
        labels[: index % 5] = -100
        return {"ids": ids, "patches": torch.randn(2, 6, generator=draws), "labels": labels}


class Vision(nn.Module):
    """The features of all pictures, one after the other, go where the tokens say."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed = nn.Linear(6, 8), nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def features(self, patches: Tensor) -> Any:
        return list(torch.tanh(self.tower(patches)))

    def joined(self, found: Any) -> Tensor:
        return torch.cat(found, dim=0)

    def forward(self, ids: Tensor, patches: Tensor, labels: Tensor) -> Tensor:
        seen = self.joined(self.features(patches))
        torch._check_tensor_all(((ids == IMAGE).sum() * 8) == seen.numel())  # type: ignore[no-untyped-call]
        x = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], seen)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


class Stacked(Vision):
    def joined(self, found: Any) -> Tensor:
        return torch.stack(found).flatten(0, 1)


class EachAlone(Vision):
    """Something is done to each sample by itself."""

    def joined(self, found: Any) -> Tensor:
        return torch.cat([torch.tanh(each[:] * 2 + each).view(2, 8) for each in found], dim=0)


class OneAfterAnother(Vision):
    """Something is done to each sample that depends on the one before."""

    def joined(self, found: Any) -> Tensor:
        rows = [found[0]]
        for each in found[1:]:
            rows.append(each + 0.1 * rows[-1])
        return torch.cat(rows, dim=0)


class Counted(Vision):
    """The number of patches of each sample follows from the samples."""

    def features(self, patches: Tensor) -> Any:
        counts = (patches.abs().sum(-1) > 0).sum(1)
        rows = torch.tanh(self.tower(patches.flatten(0, 1)))
        return [each.reshape(-1, each.shape[-1]) for each in torch.split(rows, counts.tolist())]


class Averaged(Vision):
    """The number of elements of the list is that of the samples."""

    def joined(self, found: Any) -> Tensor:
        rows = torch.cat(found, dim=0)
        return rows * (2 * len(found)) / rows.shape[0]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OneAfterAnother()

    def forward(self, ids: Tensor, patches: Tensor, labels: Tensor) -> Any:
        return {"loss": self.inner(ids, patches, labels)}


@pytest.mark.nightly
def test_a_list_of_samples_that_is_put_together_leaves_the_model_a_graph() -> None:
    with single_threaded():
        for build in (Vision, Stacked, Averaged, EachAlone, Counted):
            setup = Setup(build=build, dataset=Captions(), clip=None)
            assert not setup.model.eager
            assert len(setup.model.sections) > 3
            one = setup.losses(1, 1, 2)
            assert setup.losses(3, 1, 2) == one
            assert worst(one, reference(setup, 2)) < 2e-6
        steps = Trainer(Vision, Captions(), adamw, 8, micro_batch=2, device="cpu").steps(1)
        assert len(list(steps)) == 1


def _batch() -> dict[str, Tensor]:
    rows = [Captions()[index] for index in range(2)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.nightly
def test_what_depends_on_the_sample_before_runs_as_written() -> None:
    assert list(partition(Recipe(Around), _batch()).eager) == ["inner"]
