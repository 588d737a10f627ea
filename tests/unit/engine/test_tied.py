"""Parameters that several stages share."""

import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import Setup, reference, single_threaded, worst


class TwoTied(nn.Module):
    """Two parameters, each tied over stages of its own: of three stages the first has one, the second the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[5].weight = self.layers[2].weight
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_exchanges_of_tied_parameters_have_the_same_numbers_on_all_stages() -> None:
    setup = Setup(TwoTied)
    _, layer = setup.model.facts.tied
    setup.adjusted = lambda plan: plan if plan.stages == 1 else plan.model_copy(update={"starts": (0, *layer.sections)})
    with single_threaded():
        deep = setup.losses(3, 1, 2)
        own = [{tied.name for tied in session.current.stage.tied} for session in setup.finished if session.current]
        assert own == [{"embed.weight"}, {"layers.2.weight"}, {"embed.weight", "layers.2.weight"}]
        assert deep == setup.losses(1, 1, 2)
        assert worst(deep, reference(setup, 2)) < 1e-5
