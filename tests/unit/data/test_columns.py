"""Samples of any usual form become named tensors; what nobody takes is left out with a word."""

import dataclasses
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from varuna.core.errors import DataError
from varuna.data.columns import Columns, InputNames, tensor_of
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.capture.signature import input_names

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Point:
    x: list[float]
    y: int


class Net(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        return x


class Open(nn.Module):
    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return x


def columns(model: Any = Net, *, loss: Any = None) -> Columns:
    return Columns(lambda: input_names(Recipe(model, loss), is_weighed=False))


X, Y = torch.tensor([1.5, 2.5]), torch.tensor(3)


@pytest.mark.parametrize(
    "sample",
    [
        {"x": X, "y": Y},
        {"x": [1.5, 2.5], "y": 3},
        {"x": np.array([1.5, 2.5], np.float32), "y": np.int64(3)},
        {"x": (1.5, 2.5), "y": np.array(3)},
        (X, Y),
        [X, Y],
        ([1.5, 2.5], 3),
        Pair([1.5, 2.5], 3),
        Point([1.5, 2.5], 3),
        {"x": X, "y": Y, "text": "left out", "id": None, "mask_": [["a"], ["b"]]},
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_every_usual_form_becomes_the_same_named_tensors(sample: object) -> None:
    found = columns().tensors(sample, "dataset[0]")
    assert list(found) == ["x", "y"]
    assert torch.equal(found["x"], X)
    assert torch.equal(found["y"], Y)
    assert (found["x"].dtype, found["y"].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("sample", [X, X.numpy(), [1.5, 2.5]], ids=["tensor", "array", "list"])
def test_a_sample_of_one_value_is_the_first_parameter(sample: object) -> None:
    [(key, value)] = columns(lambda: Net()).tensors(sample, "dataset[0]").items()
    assert key == "x"
    assert torch.equal(value, X)


def test_unsigned_tokens_become_whole_numbers_that_torch_computes_with() -> None:
    found = [tensor_of(np.arange(3, dtype=kind)) for kind in (np.uint16, np.uint32, np.uint8, ">i4")]
    assert [None if each is None else each.dtype for each in found] == [
        torch.int64,
        torch.int64,
        torch.uint8,
        torch.int32,
    ]
    assert all(each is not None and each.tolist() == [0, 1, 2] for each in found)


def test_an_array_is_copied_so_that_a_read_only_one_is_quiet_and_none_is_written_to() -> None:
    array = np.ones(2)
    array.flags.writeable = False
    found = tensor_of(array)
    assert found is not None
    found += 1
    assert array.tolist() == [1, 1]


def test_one_value_more_than_forward_takes_is_the_labels_of_a_loss() -> None:
    found = columns(Open, loss=lambda output, batch: output).tensors((X, Y), "dataset[0]")
    assert list(found) == ["x", "labels"]
    with pytest.raises(DataError, match=r"dataset\[5\] has 2 values, but Open.forward\(\) takes x\..*pass loss="):
        columns(Open).tensors((X, Y), "dataset[5]")


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Comparing(nn.Module):
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return x


@pytest.mark.parametrize(("model", "second"), [(Masked, "labels"), (Comparing, "targets")])
def test_an_optional_parameter_gets_the_labels_of_a_loss_only_if_its_name_says_so(
    model: type[nn.Module], second: str
) -> None:
    found = columns(model, loss=lambda output, batch: output).tensors((X, Y), "dataset[0]")
    assert list(found) == ["x", second]
    assert list(columns(model).tensors((X, X), "dataset[0]")) == ["x", {"labels": "mask"}.get(second, second)]


def test_what_cannot_be_a_tensor_and_is_taken_is_named() -> None:
    with pytest.raises(DataError, match=r"dataset\[4\]\['x'\] must be a dense tensor.*is a str.*collate="):
        columns().tensors({"x": "a text", "other": "b"}, "dataset[4]")


@pytest.mark.parametrize(
    ("sample", "place"), [({"x": None}, r"\['x'\]"), ({"x": {"a": X, "b": None}}, r"\['x'\]\['b'\]")]
)
def test_none_is_refused_with_the_advice_to_leave_the_key_out(sample: Any, place: str) -> None:
    with pytest.raises(DataError, match=rf"dataset\[4\]{place} must be .*but is a NoneType\. Leave the key out"):
        columns().tensors(sample, "dataset[4]")


@pytest.mark.parametrize("y", [X, torch.ones(3)], ids=["equal", "unequal"])
def test_a_named_tuple_of_tensors_in_a_sample_is_refused_whatever_their_shapes_are(y: Tensor) -> None:
    with pytest.raises(DataError, match=r"dataset\[4\]\['x'\] must be a dense tensor.*is a Pair"):
        columns().tensors({"x": Pair(X, y)}, "dataset[4]")


def test_columns_that_are_not_used_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    source = SampleSource(
        [{"x": X, "note": "a", "idx_of_this_test": [0] * n} for n in range(1, 4)],
        seed=0,
        names=lambda: InputNames("Tested", ("x",), frozenset({"x"})),
    )
    for position in range(3):
        assert list(source.micro_batch([position]).tensors) == ["x"]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "varuna: samples also have 'idx_of_this_test', 'note', which Tested.forward() does not take: not used"
    ]


def test_columns_of_unequal_lengths_that_nobody_takes_are_left_out() -> None:
    rows = [{"x": X, "offsets": list(range(n))} for n in (1, 2)]
    source = SampleSource(rows, seed=0, names=lambda: InputNames("Ragged", ("x",), frozenset({"x"})))
    assert list(source.micro_batch([0, 1]).tensors) == ["x"]


def test_what_a_loss_may_read_is_kept() -> None:
    found = columns(loss=lambda output, batch: output).tensors({"x": X, "weights": [1, 2], "text": "t"}, "dataset[0]")
    assert list(found) == ["x", "weights"]


def test_the_label_of_hugging_face_datasets_is_passed_as_labels() -> None:
    names = InputNames("Classifier", ("input_ids", "labels"), frozenset({"input_ids", "labels"}), takes_any=True)
    found = Columns(lambda: names).tensors({"input_ids": [1, 2], "label": 1, "text": "t"}, "dataset[0]")
    assert {key: value.tolist() for key, value in found.items()} == {"input_ids": [1, 2], "labels": 1}


def test_names_are_not_asked_for_where_samples_are_tensors() -> None:
    def ask() -> InputNames:
        raise AssertionError

    assert set(Columns(ask).tensors({"x": X, "anything": [1]}, "dataset[0]")) == {"x", "anything"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (DataLoader(TensorDataset(X)), r"DataLoader.*Pass loader\.dataset.*collate_fn.*num_workers"),
        (DataLoader(Stream()), r"Stream in a DataLoader\) cannot be indexed.*list\(stream\)"),
        ({"train": [X], "test": [X]}, r"dict with 'train', 'test'.*dataset\['train'\]"),
    ],
    ids=["loader", "loader of a stream", "splits"],
)
def test_what_holds_a_dataset_is_refused_with_what_to_pass(dataset: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SampleSource(dataset, seed=0)
