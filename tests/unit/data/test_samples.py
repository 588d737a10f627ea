"""Every stage reads the same samples, and what cannot be read is named."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from varuna.core.errors import DataError
from varuna.core.sample_digest import is_same_sample
from varuna.data.collate import Sample
from varuna.data.digests import sample_digest, tensors_digest
from varuna.data.order import sample_index
from varuna.data.randomness import generator_lock
from varuna.data.samples import MicroBatch, SampleSource, verify_digests


class Noisy(Dataset[Sample]):
    """Draws from all three libraries."""

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"x": torch.tensor(noise), "index": torch.tensor(index)}


class Unsized(Dataset[Sample]):
    """Serves the first five positions."""

    def __getitem__(self, index: int) -> Sample:
        if index >= 5:
            raise IndexError("out of data")
        return {"x": torch.tensor(index)}


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return iter([])


def rows(*samples: Any) -> SampleSource:
    """Unshuffled, so that a position is an index."""

    class Rows(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return samples[index]

    return SampleSource(Rows(), seed=0)


# -- which samples -----------------------------------------------------------------------------------


def test_a_sized_dataset_is_read_in_the_public_order() -> None:
    source = SampleSource(Noisy(), seed=4)
    found = [source.read(position)[0] for position in range(24)]
    assert found == [sample_index(position, size=8, seed=4) for position in range(24)]


def test_a_dataset_without_length_is_read_by_position() -> None:
    assert SampleSource(Unsized(), seed=4).micro_batch([1, 2, 4]).indices == (1, 2, 4)


def test_a_sample_is_waited_for_while_others_may_draw() -> None:
    class Coming(Unsized):
        def wait_for(self, index: int) -> None:
            drawing = threading.Thread(target=lambda: drawn.append((index, can_draw())))
            drawing.start()
            drawing.join()

    def can_draw() -> bool:
        if found := generator_lock.acquire(timeout=1):
            generator_lock.release()
        return found

    drawn: list[tuple[int, bool]] = []
    SampleSource(Coming(), seed=4).micro_batch([1, 2])
    assert drawn == [(1, True), (2, True)]


def test_two_stages_read_the_same_noise_whatever_they_drew_before() -> None:
    one, other = SampleSource(Noisy(), seed=4), SampleSource(Noisy(), seed=4)
    first = one.micro_batch(range(6))
    torch.rand(7), random.random(), np.random.rand(3)
    other.micro_batch(range(11, 13))
    second = other.micro_batch(range(6))
    assert torch.equal(first.tensors["x"], second.tensors["x"])
    verify_digests(first, second.digests, who="stage 1", rank=1)


def test_a_sample_has_other_noise_in_the_next_epoch() -> None:
    source = SampleSource(Noisy(1), seed=4)
    assert not torch.equal(source.read(0)[1]["x"], source.read(1)[1]["x"])


def test_a_micro_batch_has_only_the_inputs_asked_for_but_digests_of_all() -> None:
    source = SampleSource(Noisy(), seed=4)
    some, everything = source.micro_batch(range(3), ["index"]), source.micro_batch(range(3))
    assert list(some.tensors) == ["index"]
    assert list(everything.tensors) == ["x", "index"]
    assert some.digests == everything.digests


def test_samples_that_nobody_compares_have_no_digests() -> None:
    source = SampleSource(Noisy(), seed=4)
    alone, compared = source.micro_batch(range(3), compared=False), source.micro_batch(range(3))
    assert not alone.digests
    assert len(compared.digests) == 3
    assert torch.equal(alone.tensors["x"], compared.tensors["x"])


def test_reading_leaves_no_trace_in_the_generators_even_when_a_sample_fails() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = random.random(), float(np.random.normal()), float(torch.rand(()))
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    SampleSource(Noisy(), seed=4).micro_batch(range(6))
    with pytest.raises(IndexError):
        SampleSource(Unsized(), seed=4).micro_batch([1, 5])
    assert expected == (random.random(), float(np.random.normal()), float(torch.rand(())))


# -- datasets that cannot be used --------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Stream(), iter([]), 5])
def test_a_stream_is_refused_with_a_recipe(dataset: object) -> None:
    with pytest.raises(DataError, match=r"cannot be indexed.*list\(stream\).*__getitem__"):
        SampleSource(dataset, seed=0)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        SampleSource([], seed=0)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((1, 2), r"dataset\[0\] is a tuple of 2, and the model does not tell.*dict"),
        ("text", r"dataset\[0\] must be a dict.*is a str.*collate="),
        ({"x": [[1], [2, 3]]}, r"dataset\[0\]\['x'\].*is a list of unequal lists.*collate="),
        ({"x": torch.eye(2).to_sparse()}, r"dataset\[0\]\['x'\].*sparse"),
        ({7: torch.ones(2)}, r"dataset\[0\].*key 7"),
    ],
)
def test_a_sample_that_cannot_be_named_tensors_is_named(sample: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows(sample).micro_batch([0])


def test_an_exception_of_the_dataset_stays_itself_and_names_the_sample() -> None:
    with pytest.raises(IndexError, match="out of data") as caught:
        SampleSource(Unsized(), seed=0).micro_batch([4, 5])
    [note] = caught.value.__notes__
    assert "dataset[5], position 5" in note
    assert "without __len__ must serve every position" in note


# -- collating ---------------------------------------------------------------------------------------


def test_samples_of_different_shapes_are_named_with_the_remedy() -> None:
    source = rows({"x": torch.ones(3)}, {"x": torch.ones(3)}, {"x": torch.ones(4)})
    with pytest.raises(DataError, match=r"'x' has shape \(3,\) in dataset\[0\] but \(4,\) in dataset\[2\].*collate="):
        source.micro_batch([0, 1, 2])


def test_samples_of_different_dtypes_are_named() -> None:
    source = rows({"x": torch.ones(3)}, {"x": torch.ones(3, dtype=torch.float64)})
    with pytest.raises(DataError, match=r"float32 in dataset\[0\] but torch.float64 in dataset\[1\]"):
        source.micro_batch([0, 1])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_sample_that_lacks_a_key_is_named(order: list[int]) -> None:
    source = rows({"x": torch.ones(3), "mask": torch.ones(3)}, {"x": torch.ones(3)})
    with pytest.raises(DataError, match=r"dataset\[1\] has no 'mask', only 'x'"):
        source.micro_batch(order)


def test_an_input_that_the_dataset_lacks_is_named() -> None:
    with pytest.raises(DataError, match=r"dataset\[0\] has no 'labels', only 'x'"):
        rows({"x": torch.ones(3)}).micro_batch([0], ["labels"])


def with_collate(collate: Callable[[list[Sample]], Any]) -> SampleSource:
    return SampleSource(Noisy(), seed=4, collate=collate)


def test_a_collate_of_the_user_pads_and_may_draw() -> None:
    def pad(samples: list[Sample]) -> Mapping[str, Tensor]:
        rows = [torch.cat([sample.pop("x"), torch.rand(1)]) for sample in samples]
        return {"x": torch.stack(rows), "y": torch.zeros(len(rows))}

    first, second, alone = (with_collate(pad).micro_batch(each, ["x"]) for each in ([2, 3], [2, 3], [3]))
    assert first.tensors["x"].shape == (2, 4)
    assert torch.equal(first.tensors["x"], second.tensors["x"])
    assert torch.equal(first.tensors["x"][1:], alone.tensors["x"]), "draws belong to a sample"
    assert first.digests == second.digests
    assert first.digests[1:] == alone.digests


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "what collate returns must be a dict.*is a str"),
        ({"x": ["a", "b"]}, r"what collate returns\['x'\] must be a dense tensor.*is a list"),
        ({}, "collate= returns no tensors"),
        ({"y": torch.ones(2)}, "needs 'x', but collate returned only 'y'"),
    ],
)
def test_a_collate_that_returns_something_else_is_refused(batch: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        with_collate(lambda _: batch).micro_batch([0, 1], ["x"])


def test_an_exception_of_collate_names_the_samples() -> None:
    def broken(_: list[Sample]) -> Any:
        raise KeyError("oops")

    with pytest.raises(KeyError) as caught:
        with_collate(broken).micro_batch([0])
    assert "while collating dataset indices" in caught.value.__notes__[0]


# -- digests -----------------------------------------------------------------------------------------

SAMPLE = {"x": torch.arange(6, dtype=torch.int32), "y": torch.tensor(1.5)}


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.arange(6, dtype=torch.int32)},
        {"z": SAMPLE["x"], "y": SAMPLE["y"]},
        {"x": SAMPLE["y"], "y": SAMPLE["x"]},
        {"x": SAMPLE["x"].view(2, 3), "y": SAMPLE["y"]},
        {"x": SAMPLE["x"].view(torch.float32), "y": SAMPLE["y"]},
        {"x": SAMPLE["x"], "y": torch.nextafter(SAMPLE["y"], torch.tensor(2.0))},
    ],
)
def test_digests_see_keys_dtypes_shapes_and_bytes(other: Sample) -> None:
    assert tensors_digest(other) != tensors_digest(SAMPLE)


def test_digests_do_not_see_layout_in_memory_or_order_of_keys() -> None:
    strided = torch.arange(12, dtype=torch.int32)[::2] // 2
    assert tensors_digest({"y": SAMPLE["y"].requires_grad_(), "x": strided}) == tensors_digest(SAMPLE)


FEATURES: Sample = {
    "x": torch.rand(3, 40_000, generator=torch.Generator().manual_seed(0)) - 0.5,
    "y": torch.rand(3, 40_000, generator=torch.Generator().manual_seed(1)).to(torch.complex64),
    "label": torch.tensor(3),
}


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({}, True),
        ({"x": FEATURES["x"] * (1 + 1e-5 * torch.rand(3, 40_000))}, True),
        ({"x": FEATURES["x"].flip(0)}, False),
        ({"x": FEATURES["x"].roll(1, 1)}, False),
        ({"x": 1.01 * FEATURES["x"]}, False),
        ({"x": FEATURES["x"] + 0.01 * torch.randn(3, 40_000)}, False),
        ({"x": FEATURES["x"].double()}, False),
        ({"x": FEATURES["x"].view(40_000, 3)}, False),
        ({"x": FEATURES["y"].real, "y": FEATURES["x"].to(torch.complex64)}, False),
        ({"y": FEATURES["y"].conj()}, True),
        ({"y": 1j * FEATURES["y"]}, False),
        ({"label": torch.tensor(4)}, False),
        ({"x": torch.full((3, 40_000), float("nan"))}, False),
    ],
)
def test_digests_that_cross_know_a_sample_again_that_another_processor_has_rounded(
    other: Sample, is_same: bool
) -> None:
    mine, theirs = sample_digest(FEATURES), sample_digest({**FEATURES, **other})
    assert is_same_sample(mine, theirs) is is_same_sample(theirs, mine) is is_same
    assert torch.tensor([mine, theirs]).dtype == torch.int64
    assert is_same_sample(mine, theirs % 2**64) is is_same  # as a newcomer says it


def test_samples_without_floats_are_compared_by_the_byte() -> None:
    tokens = {"input_ids": torch.arange(100)}
    assert sample_digest(tokens) == tensors_digest(tokens)
    assert not is_same_sample(sample_digest(tokens), sample_digest({"input_ids": torch.arange(1, 101)}))


@given(st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.bool, torch.bfloat16, torch.complex64]))
def test_digests_take_any_shape_and_fit_an_int64_tensor(shape: list[int], dtype: torch.dtype) -> None:
    assert torch.tensor([tensors_digest({"x": torch.zeros(shape, dtype=dtype)})]).dtype == torch.int64


def micro_batch(*digests: int) -> MicroBatch:
    return MicroBatch({}, digests, tuple(range(10, 10 + len(digests))))


def test_a_sample_that_differs_stops_the_run_with_its_name() -> None:
    with pytest.raises(DataError, match=r"dataset\[11\] is not the same here and on stage 0 .*ffffffffffffffff.*seeds"):
        verify_digests(micro_batch(1, 2, 3), [1, -1, 4], who="stage 0", rank=0)


def test_a_digest_too_few_is_no_agreement() -> None:
    with pytest.raises(DataError, match="stage 0 read 2 samples for a micro-batch of 3"):
        verify_digests(micro_batch(1, 2, 3), [1, 2], who="stage 0", rank=0)


def test_each_sample_that_collate_keeps_gets_the_number_of_its_step() -> None:
    def kept(samples: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([sample for sample in samples if sample is not None])}

    dataset = [None if index % 3 == 1 else torch.full((2,), float(index)) for index in range(8)]
    source = SampleSource(
        dataset, seed=0, collate=kept, shuffles=False, step_at=lambda position: position // 4, wants_step=lambda: True
    )
    assert source.micro_batch(range(3, 7)).tensors["step"].tolist() == [0, 1, 1]
    assert source.micro_batch([1]).tensors["step"].tolist() == [0]  # another sample in its place, which counts nothing
