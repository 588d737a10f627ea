"""A boundary between sections changes of a value only what it may: cut after every op, against plain eager."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.depth import by_depth
from tests.unit.engine.models import Tokens
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.partition.families import Family
from tests.unit.partition.in_turn import differences, everywhere
from varuna.engine.stage.tape import crossing
from varuna.partition.graph.costs import Cost
from varuna.partition.graph.flow import Flow
from varuna.partition.graph.operations import op_name
from varuna.partition.model import CutChooser

functional = nn.functional


class Layers(nn.Module):
    """An embedding, layers with something in their middle, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + self.middle(layer(x))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = self.layer(layer, x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Spectral(Layers):
    """Complex activations; conjugates are lazy, and so are the signs of their imaginary parts."""

    def middle(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x, dim=1)
        weights = torch.polar(torch.ones(16), torch.linspace(0, 3, 16))
        mixed = spectrum * weights[:, None]
        turned = mixed.conj().transpose(1, 2)
        made: Tensor = torch.fft.ifft(turned.transpose(1, 2), dim=1).real + turned.transpose(1, 2).imag
        return made


class Strided(Layers):
    """Windows by strides, of a tensor that is not contiguous; ``relu`` hands the strides on."""

    def middle(self, x: Tensor) -> Tensor:
        turned = torch.relu(x.transpose(1, 2).contiguous().transpose(1, 2) + 0.5)
        sizes, strides = list(turned.shape), list(turned.stride())
        windows = turned.as_strided([sizes[0], 8, 9, 8], [strides[0], strides[1], strides[1], strides[2]])
        return torch.cat([windows.mean(2), windows.mean(1)[:, :8]], 1)


class Viewed(Layers):
    """``view`` of what attention made: export leaves out the ``contiguous``, which its own strides do not need."""

    def middle(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).contiguous().view(x.shape)


class Waves(Layers):
    """A complex residual stream: it crosses every cut, conjugated lazily."""

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        change = torch.tanh(layer(torch.cat([x.real, x.imag], -1)))
        return (x + torch.complex(change[..., :4], change[..., 4:])).conj()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.view_as_complex(self.embed(input_ids).unflatten(-1, (4, 2)))
        for layer in self.layers:
            x = self.layer(layer, x)
        return functional.cross_entropy(self.head(torch.cat([x.real, x.imag], -1)).flatten(0, 1), labels.flatten())


class Checkpointed(Layers):
    """Recomputed as ``gradient_checkpointing_enable`` of Hugging Face switches it on."""

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().layer, layer, x, use_reentrant=True)
        return result


class Unlearned(Checkpointed):
    """Nothing that goes into the first block learns: as in eager, nothing in it does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.last = nn.Linear(8, 8)

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        made = super().layer(layer, x)
        return made + self.last(made) if layer is self.layers[0] else made


def behind_attention(flow: Flow, costs: Sequence[Cost]) -> list[int]:
    """Cuts after every attention, and nowhere else: the views after it are taken of what has crossed."""
    return [i for i in everywhere(flow, costs) if op_name(flow.ops[i]) == "aten::scaled_dot_product_attention"]


CUT: list[tuple[Callable[[], nn.Module], CutChooser]] = [
    (Strided, everywhere),
    (Spectral, everywhere),
    (Waves, everywhere),
    (Viewed, behind_attention),
]


@pytest.mark.parametrize(("build", "choose"), by_depth(CUT[:1], CUT))
def test_wherever_it_is_cut_it_equals_eager(build: Callable[[], nn.Module], choose: CutChooser) -> None:
    model, found = differences(Family(build), choose=choose)
    assert found == []
    assert len(model.sections) >= 3


RECOMPUTED: list[Callable[[], nn.Module]] = [Checkpointed, Unlearned]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("build", by_depth(RECOMPUTED[:1], RECOMPUTED))
def test_recomputed_blocks_learn_what_they_learn_in_eager(build: Callable[[], nn.Module]) -> None:
    assert differences(Family(build), choose=everywhere)[1] == []


@pytest.mark.nightly
def test_complex_values_and_their_gradients_cross_links() -> None:
    with single_threaded():
        job = Setup(build=Waves, dataset=Tokens())
        into = [each for crossings in job.model.split.crossings for each in crossings]
        assert any(each.dtype is torch.complex64 and each.differentiable for each in into)
        alone = job.losses(1, 1, steps=3)
        assert worst(alone, reference(job, steps=3)) < 1e-5
        assert job.losses(3, 1, steps=3) == alone
        assert worst(job.losses(2, 2, steps=3), alone) < 1e-6


def test_nothing_lazy_crosses() -> None:
    """A message conjugates; kernels, and so bits, must not be others where none is sent."""
    value = torch.view_as_complex(torch.arange(12.0).reshape(2, 3, 2)).t().conj()
    for crossed, source in zip(crossing((value, value.imag)), (value, value.imag), strict=True):
        assert torch.equal(crossed, source)
        assert crossed.is_contiguous()
        assert not crossed.is_conj()
        assert not crossed.is_neg()
