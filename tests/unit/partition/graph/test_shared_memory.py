"""Writes in place, cut wherever that is possible: losses and gradients of plain PyTorch, step by step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.partition.in_turn import everywhere, run_in_turn
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe, capture
from varuna.partition.graph.shared_memory import SharedMemory
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition

functional = nn.functional
SIDE = 6


class Points:
    """Random samples; the loss is a mean over their targets that are not negative."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(SIDE, SIDE, generator=generator),
            "mask": torch.randint(0, 2, (SIDE, SIDE), generator=generator),
            "y": torch.randn(SIDE, SIDE, generator=generator),
        }


class Values:
    """The values that a model has computed so far, and may write to."""

    def __init__(self, x: Tensor, mask: Tensor, y: Tensor, layers: Any, table: Tensor) -> None:
        self.layers, self.table = layers, table
        self.y, self.mask = y, mask
        self.floats = [torch.tanh(layers[0](x))]
        self.numbers = [(self.floats[0].detach() > 0).long(), mask + 1]

    def layer(self, number: int) -> None:
        self.floats.append(torch.tanh(self.layers[number % 3](self.floats[-1])) + self.floats[-1])


Write = Callable[[Values], None]


class Writing(nn.Module):
    """Layers; between them values, masks, inputs and their views are written."""

    def __init__(self, *writes: Write) -> None:
        super().__init__()
        self.writes = writes
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(4))
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, SIDE))

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        values = Values(x, mask, y, self.layers, self.table)
        for number, write in enumerate(self.writes):
            write(values)
            values.layer(number)
        scale = sum(number.float().mean(-1, keepdim=True) for number in values.numbers)
        mixed = self.layers[3](sum(values.floats) * scale * 0.1)
        return functional.mse_loss(mixed + values.mask, values.y)


def dropped_and_masked(v: Values) -> None:
    """As in XLM and FlauBERT: a dropout of zero returns its argument itself."""
    x = v.floats[-1] * 1.5
    dropped = functional.dropout(x, 0.0, True)
    v.layer(1)
    dropped *= v.mask.to(dropped.dtype)
    v.floats.append(x)


def a_number(v: Values) -> None:
    v.numbers[0][:, 1] = 3


def all_numbers(v: Values) -> None:
    torch._foreach_add_(list(v.numbers), 1)
    torch.add(v.numbers[0], 1, out=v.numbers[0])


def a_chunk_of_numbers(v: Values) -> None:
    left, right = v.numbers[0].chunk(2, -1)
    v.layer(0)
    left += 1
    v.numbers.append(right)


def an_input(v: Values) -> None:
    v.mask[v.mask == 0] = 2
    v.y.mul_(0.5)


def a_view_of_an_input(v: Values) -> None:
    first = v.mask[:, :1]
    v.layer(0)
    first += 1


def a_view(v: Values) -> None:
    x = v.floats[-1] * 1.0
    turned = x.transpose(1, 2)
    v.layer(1)
    x.add_(0.25)
    v.floats += [x, turned]


def its_base(v: Values) -> None:
    x = v.floats[-1] * 1.0
    row = x[:, 0]
    v.layer(1)
    row += 1
    v.layer(0)
    v.floats.append(x)


def reshaped(v: Values) -> None:
    x = v.floats[-1] * 1.0
    flat = x.reshape(-1, SIDE).contiguous().type_as(x)
    v.layer(2)
    flat.add_(0.5)
    v.floats.append(x)


def one_of_many(v: Values) -> None:
    number, mask = torch.broadcast_tensors(v.numbers[0].float(), v.mask.float())  # type: ignore[no-untyped-call]
    swapped = torch.einsum("bij->bji", mask)
    v.layer(1)
    swapped[:, 0] = 4
    v.floats.append(mask + number)


def without_a_gradient(v: Values) -> None:
    x = v.floats[-1] * 1.0
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)
    v.layer(1)
    x.masked_fill_(v.mask.bool(), 0.125)
    v.floats.append(x)


def in_autocast(v: Values) -> None:
    x = v.numbers[0].float()
    v.layer(1)
    with torch.autocast("cpu", torch.bfloat16):
        x.mul_(0.5)
    v.floats.append(x)


def a_copy_of_a_table(v: Values) -> None:
    table = v.table + 0
    expanded = torch.cat([torch.tensor([]), table])
    v.layer(0)
    expanded[0] = 7
    v.floats.append(v.floats[-1] * table + expanded)


def a_constant(v: Values) -> None:
    table = torch.tensor([1.0, 2, 3, 4, 5, 6])
    part = table[2:]
    v.layer(0)
    part *= v.mask.sum()
    v.layer(1)
    v.floats.append(v.floats[-1] + table)


WRITES = [
    dropped_and_masked,
    a_number,
    all_numbers,
    a_chunk_of_numbers,
    an_input,
    a_view_of_an_input,
    a_view,
    its_base,
    reshaped,
    one_of_many,
    without_a_gradient,
    in_autocast,
    a_copy_of_a_table,
    a_constant,
]


@pytest.mark.parametrize("write", by_depth(WRITES[:2], WRITES), ids=lambda write: write.__name__)
def test_what_is_written_in_place_is_never_cut_off(write: Write) -> None:
    compare(write)


def normalised_in_autocast(v: Values) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        v.floats.append(functional.batch_norm(v.floats[-1], v.table.clone() * 0, v.table, training=True).float())


def test_statistics_that_are_updated_within_autocast_are_refused() -> None:
    batch = SampleSource(Points(), seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(
        ModelError, match=r"updates table within torch\.autocast at .*test_shared_memory\.py:\d+\. .*precision="
    ):
        partition(Recipe(lambda: Writing(normalised_in_autocast)), batch)


def test_values_that_shared_a_storage_in_the_capture_share_memory() -> None:
    captured = capture(Recipe(lambda: Writing(one_of_many)), SampleSource(Points(), seed=0).micro_batch([0, 1]).tensors)
    memory = SharedMemory(captured.graph)
    nodes = {node.name: node for node in captured.graph.nodes}
    one, other, turned = nodes["getitem"], nodes["getitem_1"], nodes["einsum"]
    assert memory.of(one).isdisjoint(memory.of(other))
    assert memory.of(nodes["broadcast_tensors"]) == memory.of(one) | memory.of(other)
    assert memory.of(turned) == memory.of(other)
    assert memory.is_written(other)
    assert [writer.name for writer in memory.writers(other)] == ["fill_"]
    assert not memory.is_written(one)


@settings(max_examples=by_depth(2, 4), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(writes=st.lists(st.sampled_from(WRITES), min_size=2, max_size=4))
def test_any_writes_one_after_the_other(writes: list[Write]) -> None:
    compare(*writes)


def compare(*writes: Write) -> None:
    """Two steps of SGD, F and R and B of sections in turn, against plain PyTorch."""
    recipe = Recipe(lambda: Writing(*writes))
    source = SampleSource(Points(), seed=0)
    plain, cut = materialise(recipe, 0), materialise(recipe, 0)
    try:
        plain.module(**_clones(source, 0)).backward()
    except RuntimeError:  # a value that backward needs has been written
        assume(False)
    model = partition(recipe, source.micro_batch([0, 1]).tensors, choose=everywhere)
    assert len(model.sections) > 2
    for step in range(2):
        plain.module.zero_grad()
        expected = plain.module(**_clones(source, step))
        expected.backward()
        given, size = _clones(source, step), 3
        before = {name: value.clone() for name, value in given.items()}
        loss, gradients = run_in_turn(model, cut, dict(cut.buffers), given, size)
        assert all(torch.equal(given[name], value) for name, value in before.items()), "samples are not written"
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
        for name, parameter in plain.module.named_parameters():
            if parameter.grad is None:
                assert name not in gradients
                continue
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
                cut.parameters[name].detach().sub_(0.1 * gradients[name])


def _clones(source: SampleSource, step: int) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in source.micro_batch([step, 7, 11]).tensors.items()}
