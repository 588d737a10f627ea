"""Inputs of a model of pictures, from its constructor."""

from dataclasses import dataclass

from torch import nn

from tests.field.pictures import _arguments_of, _tiny


@dataclass
class Settings:
    embed_dim: int = 768
    depth: int = 12
    reg_tokens: int = 4


class Configured(nn.Module):
    def __init__(self, cfg: Settings | None = None, in_chans: int = 3) -> None:
        super().__init__()


def test_fields_of_a_configuration_are_arguments_of_the_builder() -> None:
    found = _tiny(_arguments_of(Configured))
    assert found == {"embed_dim": 32, "depth": 4}
