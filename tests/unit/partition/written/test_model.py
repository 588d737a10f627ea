"""A captured model survives the way to another process, and nothing but a model does."""

import json
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.depth import of_depth
from tests.unit.partition.families import NAMED
from varuna.partition.capture.capture import Recipe
from varuna.partition.evaluation import for_evaluation
from varuna.partition.lengths import partition_lengths
from varuna.partition.model import PartitionedModel, partition
from varuna.partition.written.graphs import CannotShareError
from varuna.partition.written.model import from_bytes, to_bytes


class Mixed(nn.Module):
    """A model whose graph has constants, tied weights, statistics, an autocast region and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.angles = torch.polar(torch.ones(4), torch.arange(4.0))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.view_as_real(self.angles).reshape(8)
        if (labels < 0).any():
            x = x * 2
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.relu(self.inner(x))
        x = nn.functional.dropout(x.float(), 0.1, self.training)
        x = x.masked_fill(torch.ones(ids.shape[1], 8).tril() == 0, -torch.inf).clamp(min=-1e4)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([value for _, value in named])


def tokens(length: int) -> dict[str, Tensor]:
    return {"ids": torch.arange(2 * length).reshape(2, length) % 16, "labels": torch.ones(2, length, dtype=torch.int64)}


@cache
def mixed() -> PartitionedModel:
    return partition(Recipe(Mixed), tokens(6), optimizer=adamw)


def assert_same(one: PartitionedModel, two: PartitionedModel) -> None:
    """All that the engine, the planner and the checks see."""
    assert two.facts == one.facts
    assert [section.module.code for section in two.sections] == [section.module.code for section in one.sections]
    for name in ("shapes", "dtypes", "trainable", "aliases", "metrics", "inputs", "operations", "cuts", "mixing"):
        assert getattr(two, name) == getattr(one, name), name
    assert two.constants.keys() == one.constants.keys()
    for name, value in one.constants.items():
        assert torch.equal(two.constants[name], value)
        assert two.constants[name].dtype == value.dtype


def test_what_graphs_may_hold_survives() -> None:
    model = mixed()
    back = from_bytes(to_bytes(model))
    assert_same(model, back)
    assert to_bytes(back) == to_bytes(model)
    assert model.conditions is not None
    assert any(section.updates for section in model.sections)
    assert any(isinstance(each, GraphModule) for section in model.sections for each in section.module.children())
    for one, two in zip(model.sections, back.sections, strict=True):
        kinds = [
            (node.meta.get("val"), other.meta.get("val")) for node, other in zip(nodes(one), nodes(two), strict=True)
        ]
        assert all((a.dtype, a.dim()) == (b.dtype, b.dim()) for a, b in kinds if isinstance(a, Tensor))


def nodes(section: Any) -> list[Any]:
    return list(section.module.graph.nodes)


@pytest.mark.parametrize("name", of_depth(NAMED, {"llama"}))
def test_families_compute_the_same_bits(name: str) -> None:
    family = NAMED[name]
    batch = torch.utils.data.default_collate([family.sample(index) for index in range(2)])
    model = partition(Recipe(family.build, family.loss), batch, optimizer=adamw)
    if family is NAMED["bloom"]:  # has autograd functions of its own
        with pytest.raises(CannotShareError):
            to_bytes(model)
        return
    back = from_bytes(to_bytes(model))
    assert_same(model, back)
    for one, two in zip(model.sections, back.sections, strict=True):
        assert_same_results(one.module, two.module, model, one, batch)


def assert_same_results(one: Any, two: Any, model: PartitionedModel, section: Any, batch: Any) -> None:
    """Both graphs, given the same numbers."""
    generator = torch.Generator().manual_seed(1)
    crossings = {crossing.name: crossing for crossing in model.split.crossings[section.index]}

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.rand(shape, generator=generator, dtype=dtype)
        return torch.ones(shape, dtype=dtype)

    given: list[Any] = [drawn(crossings[name].shape(2), crossings[name].dtype) for name in section.takes]
    given += [batch[key] for key in section.inputs] + [2] * section.needs_batch_size
    given += [drawn(model.shapes[name], torch.float32) for name in section.parameters]
    if section.buffers:
        return
    given += [model.constants[name] for name in section.constants]
    found = []
    for module in (one, two):
        torch.manual_seed(3)
        found.append(module(*given))
    for a, b in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)) or torch.isnan(torch.as_tensor(a)).any()


@pytest.mark.nightly
def test_several_lengths_and_evaluation_survive() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())

    model = partition_lengths(Recipe(Padded), tokens(8), (4, 8), optimizer=adamw)
    back = from_bytes(to_bytes(model))
    assert_same(model, back)
    assert len(back.variants) == 2
    for one, two in zip(model.variants, back.variants, strict=True):
        assert_same(one, two)
    tested = for_evaluation(back, Recipe(Padded), tokens(8))
    assert_same(tested, from_bytes(to_bytes(tested)))


def test_modules_that_run_as_written_stay_in_their_process() -> None:
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = Doubling.apply(self.head(x)).mean()  # type: ignore[no-untyped-call]
            return loss

    model = partition(Recipe(Own), {"x": torch.ones(2, 8)})
    with pytest.raises(CannotShareError, match="runs code of this process"):
        to_bytes(model)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    for each in (data, zlib.compress(data)):
        with pytest.raises(CannotShareError):
            from_bytes(each)


@given(st.data())
def test_bytes_that_were_damaged_on_the_way_are_refused_or_the_same(data: st.DataObject) -> None:
    whole = zlib.decompress(to_bytes(mixed()))
    place = data.draw(st.integers(0, len(whole) - 1))
    spoilt = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    try:
        back = from_bytes(zlib.compress(spoilt))
    except CannotShareError:
        return
    assert back.facts.digest  # such as a byte of a constant, or of a label


def rewritten(change: Callable[[str], str]) -> bytes:
    """The mixed model, with other JSON."""
    whole = zlib.decompress(to_bytes(mixed()))
    end = 8 + int.from_bytes(whole[:8])
    text = change(whole[8:end].decode()).encode()
    json.loads(text)
    return zlib.compress(len(text).to_bytes(8) + text + whole[end:])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"torch.ops.aten.relu.default"', '"torch.ops.aten.sigmoid.default"', id="another operation"),
        pytest.param('"torch.ops.aten.relu.default"', '"os.system"', id="a function of Python's"),
        pytest.param('"torch.ops.aten.relu.default"', '"torch.ops.loaded_libraries"', id="no operation"),
        pytest.param('"torch.ops.aten.relu.default"', '"torch.ops.load_library.x.y"', id="a method of torch's"),
        pytest.param('"relu"', '"relu = print(1)\\n    x"', id="code as a name"),
        pytest.param('"relu"', '"while"', id="a keyword as a name"),
        pytest.param('"Section0"', '"Section0:\\n  pass"', id="code as a class"),
        pytest.param('"kind":"device","of":"cpu"', '"kind":"device","of":"gpu"', id="no device"),
        pytest.param('"kind":"Split"', '"kind":"Popen"', id="another class"),
    ],
)
def test_only_operations_get_in(old: str, new: str) -> None:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    with pytest.raises(CannotShareError):
        from_bytes(rewritten(change))
