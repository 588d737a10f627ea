"""Layers that are built narrower still fit each other, and only within."""

import torch
from torch import nn

from tests.field.narrow import narrow, smaller


def test_all_widths_are_divided_but_those_of_colours_and_classes() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3),
            nn.BatchNorm2d(64),
            nn.Conv2d(64, 64, 3, groups=64),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.LayerNorm(128),
            nn.Linear(128, 5),
        )

    with narrow(4):
        model = build()
    assert [tuple(value.shape) for name, value in model.named_parameters() if name.endswith("weight")] == [
        (16, 3, 3, 3),
        (16,),
        (16, 1, 3, 3),
        (32, 256),
        (32,),
        (5, 32),
    ]
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert build()[4].weight.shape == (128, 64 * 16)


def test_what_a_builder_passes_to_a_class_is_shrunk_on_the_way() -> None:
    class Model(nn.Module):
        def __init__(self, image_size: int, hidden_dim: int, *, num_layers: int, name: str) -> None:
            super().__init__()
            self.given = (image_size, hidden_dim, num_layers, name)

    with smaller(Model, 64, 8):
        assert Model(224, 768, num_layers=12, name="base").given == (64, 32, 4, "base")
    assert Model(224, 768, num_layers=12, name="base").given == (224, 768, 12, "base")
