"""A log is read in one order by all, whoever decides it; waits end, and say what was waited for."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from varuna.core.errors import DataError, UsageError
from varuna.extras.rollouts import Rollouts, append
from varuna.store.opening import open_store

BATCH = 16


def numbered(first: int, count: int) -> dict[str, Tensor]:
    return {"x": torch.arange(first, first + count)}


class Hours:
    """A clock that only sleeping moves; ``do`` happens in each sleep."""

    def __init__(self, do: Callable[[], object] = lambda: None) -> None:
        self.now_s, self._do = 0.0, do

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._do()

    def of(self, place: Any, staleness: int = 2, batch: int = BATCH, **more: Any) -> Rollouts:
        return Rollouts(place, batch=batch, staleness=staleness, clock=lambda: self.now_s, sleep=self.sleep, **more)


def values(dataset: Rollouts, step: int) -> list[int]:
    return [int(dataset[position]["x"]) for position in range(step * BATCH, (step + 1) * BATCH)]


@pytest.mark.parametrize("place", ["folder", "memory://rollouts"])
def test_samples_come_in_the_order_that_the_first_reader_decided(place: str, tmp_path: Path) -> None:
    where = tmp_path / place if "://" not in place else place
    append(where, numbered(0, 10), version=0)
    append(where, numbered(10, 12), version=0)
    first = Hours().of(where)
    assert sorted(values(first, 0)) == sorted(set(values(first, 0)))
    append(where, numbered(100, 40), version=0)
    other = Hours().of(where)
    assert values(other, 0) == values(first, 0)
    both = values(other, 1)
    assert values(first, 1) == both
    assert not set(both) & set(values(first, 0))


def test_readers_that_decide_at_the_same_time_agree(tmp_path: Path) -> None:
    for first in range(0, 200, 5):
        append(tmp_path, numbered(first, 5), version=0)
    found: list[list[list[int]]] = []
    start = threading.Barrier(4)

    def read() -> None:
        dataset = Hours().of(tmp_path, staleness=12)
        start.wait()
        found.append([values(dataset, step) for step in range(12)])

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(each == found[0] for each in found)
    assert len({value for step in found[0] for value in step}) == 12 * BATCH


def test_a_read_waits_for_samples_that_are_not_too_old(tmp_path: Path) -> None:
    append(tmp_path, numbered(0, 2 * BATCH + 4), version=0)
    clock = Hours(lambda: append(tmp_path, numbered(100, 8), version=3))
    dataset = clock.of(tmp_path, staleness=1)
    assert max(values(dataset, 1)) < 2 * BATCH
    append(tmp_path, numbered(50, BATCH), version=2)
    assert values(dataset, 2) == [*range(50, 50 + BATCH)]
    assert clock.now_s == 0
    assert values(dataset, 3) == [*range(100, 108)] * 2
    assert clock.now_s > 0
    order = dataset.order(2)
    assert order is not None
    assert order.skipped == 4


def test_a_wait_in_which_nothing_comes_ends_and_says_what_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path, numbered(0, 5), version=0)
    with pytest.raises(
        DataError,
        match=r"step 0 needs 16 samples of versions 0 to 0, and .* has 5 that are not used .*: 0\).* for 60[01] s",
    ):
        Hours().of(tmp_path, wait_s=600)[3]
    assert capsys.readouterr().err.count("waiting for more") == 1


def test_a_wait_goes_on_while_something_comes(tmp_path: Path) -> None:
    clock = Hours()
    clock = Hours(lambda: append(tmp_path, numbered(0, 1), version=0) if clock.now_s % 7 < 2 else None)
    clock.of(tmp_path, wait_s=10)[0]
    assert clock.now_s > 10


def test_another_batch_than_the_trainers_is_refused(tmp_path: Path) -> None:
    append(tmp_path, numbered(0, 100), version=0)
    dataset = Hours().of(tmp_path)
    dataset.set_step(0)
    assert dataset[15]
    with pytest.raises(DataError, match=r"batch=16\) needs the trainer's global_batch.* position 16 is of step 0"):
        dataset[16]
    with pytest.raises(DataError, match="16 samples a step, but this one has batch=20"):
        Hours().of(tmp_path, batch=20)[0]


def test_a_run_that_goes_on_needs_the_log_that_it_had(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="step 200 follows steps whose samples are not in"):
        Hours().of(tmp_path)[200 * BATCH]


def test_what_was_appended_and_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    append(tmp_path, numbered(0, 16), version=0)
    dataset = Hours().of(tmp_path)
    dataset.wait_for(0)
    (file,) = tmp_path.glob("version-*/*")
    file.write_bytes(b"{}")
    with pytest.raises(DataError, match="safetensors is damaged"):
        dataset[0]
    file.unlink()
    with pytest.raises(DataError, match="is gone, and a step uses it"):
        dataset[0]
    open_store(tmp_path).put("order/step-00000000.json", b"{")
    with pytest.raises(DataError, match=r"step-00000000\.json is damaged"):
        Hours().of(tmp_path)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0, "staleness": 1}, "batch must be the trainer's global_batch"),
        ({"batch": 4, "staleness": 2}, r"first 16 samples are looked at.* steps 0 to 3.* Give staleness=3"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        Rollouts(tmp_path, **options)


@pytest.mark.parametrize(
    "samples", [{}, {"x": torch.zeros(0)}, {"x": torch.tensor(1)}, {"x": torch.zeros(2), "y": torch.zeros(3)}]
)
def test_tensors_that_count_no_samples_are_refused(samples: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="first dimension counts the samples"):
        append(tmp_path, samples, version=0)


def test_a_version_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="version=-1"):
        append(tmp_path, numbered(0, 2), version=-1)
