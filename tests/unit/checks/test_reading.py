"""Datasets and collate functions whose samples follow from what was read before are refused; caches pass."""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from varuna.checks.reading import check_reading
from varuna.core.errors import DataError
from varuna.data.samples import SampleSource
from varuna.job.handed_over.code_reads import Reads

Sample = dict[str, Tensor]
total = 0


class Samples:
    """A dataset that does something with its own values whenever it is read."""

    def __init__(self, read: "Callable[[Samples, int], float]") -> None:
        self.read, self.calls, self.at, self.last, self.hits = read, 0, 0, 0.0, 0
        self.generator, self.random = torch.Generator(), random.Random(0)
        self.cache, self.order = dict[int, float](), list(range(40))
        self.scale = Counting()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Sample:
        return {"x": torch.tensor(float(self.read(self, index)))}

    @lru_cache(maxsize=4)  # noqa: B019 - as scripts do
    def loaded(self, index: int) -> float:
        return float(index)


class Counting:
    """A transform that becomes stronger."""

    calls = 0

    def __call__(self, x: float) -> float:
        self.calls += 1
        return x * (1 + self.calls // 500)


def late(data: Samples, index: int) -> float:
    data.calls += 1
    return index + (data.calls > 5000)


def inside(data: Samples, index: int) -> float:
    return data.scale(index)


def of_module(data: Samples, index: int) -> float:
    global total
    total += 1
    return index + total // 1000


def own_generator(data: Samples, index: int) -> float:
    return index + float(torch.rand((), generator=data.generator))


def seldom(data: Samples, index: int) -> float:
    return index + (data.random.random() if index % 4 == 0 else 0)


def mixed_with_the_one_before(data: Samples, index: int) -> float:
    last, data.last = data.last, index
    return index + 0.1 * last


def used_up(data: Samples, index: int) -> float:
    data.order = data.order or list(range(40))
    return data.order.pop()


def draws_kept(data: Samples, index: int) -> float:
    if index not in data.cache:
        data.cache[index] = index + random.random()
    return data.cache[index]


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (late, r"is another sample when dataset.*\.calls, which counts .* is larger.*set_step\(step\)"),
        (inside, r"when .*scale\.calls, which counts"),
        (of_module, r"when total, which counts"),
        (own_generator, r"the dataset is random"),
        (seldom, r"the dataset is random"),
        (mixed_with_the_one_before, r"the dataset is random.*state kept between calls"),
        (used_up, r"the dataset is random"),
        (draws_kept, r"drew random numbers when it was read for the first time.*random\.Random\(index\)"),
    ],
)
def test_samples_that_follow_from_what_was_read_before_are_refused(
    read: Callable[[Samples, int], float], words: str
) -> None:
    datasets: tuple[Any, ...] = (Samples(read), Subset(cast(Any, Samples(read)), range(39)))
    for data in datasets:
        with pytest.raises(DataError, match=f"(?s){words}"):
            check(data)


def logged(data: Samples, index: int) -> float:
    data.calls += 1
    return index + 0 * (data.calls % 1000 == 0)


def cached(data: Samples, index: int) -> float:
    data.hits += index in data.cache
    return data.cache.setdefault(index, index)


def remembered(data: Samples, index: int) -> float:
    return data.loaded(index)


def read_in_order(data: Samples, index: int) -> float:
    if data.at != index:
        data.at = index  # a file would be wound there
    data.at += 1
    return data.at


def seeded_by_the_index(data: Samples, index: int) -> float:
    data.generator.manual_seed(index)
    return index + float(torch.rand((), generator=data.generator))


def drawn_anew(data: Samples, index: int) -> float:
    return data.cache.setdefault(index, index) + random.random()


@pytest.mark.parametrize("read", [logged, cached, remembered, read_in_order, seeded_by_the_index, drawn_anew])
def test_counters_and_caches_that_change_no_sample_pass_and_stay(read: Callable[[Samples, int], float]) -> None:
    data = Samples(read)
    check(data)
    assert data.calls < 1000


def test_a_collate_that_counts_is_refused_and_one_that_only_logs_passes() -> None:
    calls = 0

    def counts(samples: list[Sample]) -> Any:
        nonlocal calls
        calls += 1
        return {"x": default_collate(samples)["x"] * (1 + calls // 300)}

    def logs(samples: list[Sample]) -> Any:
        nonlocal calls
        calls += 1
        return default_collate(samples)

    check([{"x": torch.tensor(1.0)}] * 40, logs)
    with pytest.raises(DataError, match="when calls, which counts"):
        check([{"x": torch.tensor(1.0)}] * 40, counts)


def check(dataset: Any, collate: Any = None) -> None:
    found = Reads()
    found.follow_reads(dataset, "dataset")
    if collate is not None:
        found.follow_reads(collate, "collate=")
    check_reading(SampleSource(dataset, seed=0, collate=collate), found.numbers)


def test_samples_that_are_not_there_yet_are_not_read() -> None:
    asked = list[int]()

    class Coming:
        """A dataset without length."""

        def __getitem__(self, position: int) -> Sample:
            asked.append(position)
            return {"x": torch.tensor(float(position))}

    class Waiting(Coming):
        def wait_for(self, position: int) -> None:
            raise AssertionError(position)

    check(Waiting())
    check(Coming())
    assert set(asked) == {0, 1, 2, 3}
