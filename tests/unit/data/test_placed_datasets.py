"""Readers tell a dataset the epoch and the step of the sample that they read next."""

from typing import Any, cast

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from varuna.core.errors import DataError
from varuna.data.order import sample_index
from varuna.data.readers import SampleRequest
from varuna.data.samples import MicroBatch, SampleSource

SIZE, BATCH = 6, 4


class Told:
    """Samples that say what was told before them."""

    epoch = step = -1

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return SIZE

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))
        self.epoch = epoch

    def set_step(self, step: int) -> None:
        self.calls.append(("step", step))
        self.step = step

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"told": torch.tensor([self.epoch, self.step])}


def source(dataset: Any, **options: Any) -> SampleSource:
    return SampleSource(dataset, seed=0, step_at=lambda position: position // BATCH, **options)


def told(found: SampleSource, first: int, count: int = BATCH) -> list[list[int]]:
    reading = found.reading()
    reading.submit(SampleRequest(tuple(range(first, first + count)), None))
    batch = reading.fetch()
    assert isinstance(batch, MicroBatch), batch
    return batch.tensors["told"].tolist()


@pytest.mark.parametrize("processes", [0, 2])
def test_each_sample_is_read_in_its_own_epoch_and_step(processes: int) -> None:
    found = source(Told(), processes=processes)
    found.prepare()
    try:
        for first in (0, 4, 8, 4, 0):  # a step is read again
            expected = [[position // SIZE, position // BATCH] for position in range(first, first + BATCH)]
            assert told(found, first) == expected
    finally:
        found.close()


def test_nothing_is_told_twice_and_sources_of_one_dataset_know_of_each_other() -> None:
    dataset = Told()
    one, other = source(dataset), SampleSource(dataset, seed=0, step_at=lambda position: 7)
    told(one, 0, 3)
    assert dataset.calls == [("epoch", 0), ("step", 0)]
    assert told(other, 0, 1) == [[0, 7]]
    assert told(one, 0, 1) == [[0, 0]]


def test_wrappers_of_torch_pass_it_on_and_other_datasets_are_asked_for_nothing() -> None:
    one, two, three = (cast(Any, Told()) for _ in range(3))
    wrappers: list[Any] = [Subset(one, range(SIZE)), ConcatDataset([two, three])]
    for wrapped in wrappers:
        assert source(wrapped).setters == ["set_epoch", "set_step"]
        assert told(source(wrapped), len(wrapped) + 1, 1)[0][0] == 1
    assert source([{"told": torch.zeros(2)}] * SIZE).setters == []
    assert told(source([{"told": torch.zeros(2)}] * SIZE), 0, 1) == [[0, 0]]


def test_what_a_setter_raises_is_told_with_the_sample() -> None:
    class Fails(Told):
        def set_epoch(self, epoch: int) -> None:
            raise DataError(f"no epoch {epoch}")

    with pytest.raises(DataError, match="no epoch 0") as raised:
        source(Fails()).read(0)
    assert f"while reading dataset[{sample_index(0, size=SIZE, seed=0)}]" in raised.value.__notes__[0]
