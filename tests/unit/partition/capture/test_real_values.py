"""Values that follow from the code alone are known while a model is exported: a branch on them is none on data."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.depth import by_depth
from tests.unit.partition.cut.test_boundaries import Layers
from tests.unit.partition.families import Family, Samples, tokens
from tests.unit.partition.in_turn import differences
from varuna.core.errors import DataError, ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.capture.real_values import RealValues, ValueSource
from varuna.partition.graph.sample_guards import check_conditions
from varuna.partition.model import partition

functional = nn.functional


def causal() -> Tensor:
    return torch.triu(torch.full((16, 16), float("-inf")), diagonal=1)


class Encoder(Layers):
    """As PyTorch's own tutorials call it: whether the mask is causal is read from the mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([nn.TransformerEncoder(layer, 1)])

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = layer(x, mask=causal())
        return made


class Filled(Layers):
    """A mask that begins as memory without values, filled in the constructor; CLIP has one."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.empty(16, 16)
        mask.fill_(float("-inf"))
        mask.triu_(1)
        self.mask = mask

    def middle(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2) + self.mask, -1) @ x


class Kept(Layers):
    """Numbers and places that only a look into tensors tells."""

    def middle(self, x: Tensor) -> Tensor:
        table = torch.empty(16)
        table[:8] = 1.0
        table.copy_(torch.arange(16) % 3)
        even = table.view(4, 4).t().reshape(-1) > 0
        width = int(even.sum())
        places = even.nonzero().squeeze(-1)
        if width > 5 and table.max().item() == 2 and torch.equal(places, places.sort().values):
            x = x[:, even].sum(1, keepdim=True) / width + x.index_select(1, places).mean(1, keepdim=True) + x
        return torch.tanh(x)


class Like(Layers):
    """Filled like something whose values are unknown."""

    def middle(self, x: Tensor) -> Tensor:
        ramp = x.new_ones(16).cumsum(0)
        if (torch.zeros_like(ramp) < ramp).all():
            x = x * ramp[:, None]
        return torch.tanh(x)


KNOWN: list[Callable[[], nn.Module]] = [Kept, Encoder, Filled, Like]


@pytest.mark.parametrize("build", by_depth(KNOWN[:1], KNOWN))
def test_what_follows_from_the_code_alone_is_no_branch_on_data(build: Callable[[], nn.Module]) -> None:
    model, found = differences(Family(build))
    assert found == []
    assert model.conditions is None


class Overwritten(Layers):
    """A tensor of zeros in which random numbers are written: a view of it is no longer known."""

    def middle(self, x: Tensor) -> Tensor:
        table = torch.zeros(4, 4)
        view = table.view(-1)
        table[1].copy_(torch.rand(4))
        return x if view.sum() > 2 else -x


class Marked(Layers):
    """A branch on memory that the samples were written to."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        seen = torch.zeros(64)
        view = seen[60:]
        seen += 1
        seen.index_fill_(0, input_ids.flatten(), 5.0)
        if view.max() > 2:
            labels = labels.flip(0)
        return super().forward(input_ids, labels)


def test_a_condition_minds_what_was_written() -> None:
    model = partition(Recipe(Marked), {key: torch.full((2, 16), 9) for key in ("input_ids", "labels")})
    check_conditions(model.conditions, {"input_ids": torch.full((1, 16), 3)}, (0,), {})
    with pytest.raises(DataError, match=r"test_real_values\.py:\d+"):
        check_conditions(model.conditions, {"input_ids": torch.full((1, 16), 62)}, (0,), {})


def test_what_an_unknown_value_was_written_to_is_unknown() -> None:
    batch = SampleSource(Samples(tokens), seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(ModelError, match=r"test_real_values\.py:\d+"):
        partition(Recipe(Overwritten), batch)


class Buffered(Layers):
    """A branch on a buffer, which weights may bring in another form, and within a region without gradients."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", causal())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            if not torch.equal(self.mask, causal()):
                labels = labels + 1
            if (input_ids == 63).all():
                labels = labels * 2
        return super().forward(input_ids, labels)


def test_what_follows_from_buffers_and_samples_is_a_condition() -> None:
    model, found = differences(Family(Buffered))
    assert found == []
    assert model.conditions is not None
    assert model.conditions.buffers == ("mask",)
    assert model.conditions.inputs == ("input_ids",)
    batch = SampleSource(Samples(tokens), seed=0).micro_batch([0]).tensors
    check_conditions(model.conditions, batch, (0,), {"mask": causal()})
    with pytest.raises(DataError, match=r"test_real_values\.py:\d+"):
        check_conditions(model.conditions, batch, (0,), {"mask": causal().t()})
    with pytest.raises(DataError, match=r"test_real_values\.py:\d+"):
        check_conditions(model.conditions, {**batch, "input_ids": torch.full((1, 16), 63)}, (0,), {"mask": causal()})


def test_memory_that_random_numbers_fill_has_a_value_where_random_numbers_have_one() -> None:
    for most, is_known in ((ValueSource.PARAMETERS, True), (ValueSource.SAMPLES, False)):
        values = RealValues(most, {})
        with values.watch(), FakeTensorMode(shape_env=ShapeEnv()):  # as gumbel_softmax() draws
            drawn = torch.empty(3).exponential_()
            assert (values.real(drawn) is not None) == is_known
