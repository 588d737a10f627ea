"""Along which dimension examples lie."""

import torch
from torch import Tensor, nn

from varuna.partition.capture.capture import Recipe
from varuna.partition.model import partition


class Nothing(nn.Module):
    """Views a tensor without elements, as models do of an image that a sample lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        none = x[:, :0].reshape(x.shape[0] * 2, 0)
        return x.square().mean() + none.sum()


def test_a_view_of_no_elements_is_captured() -> None:
    assert len(partition(Recipe(Nothing), {"x": torch.randn(2, 8)}).sections) >= 1
