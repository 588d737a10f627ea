"""Micro-batches come in order, bounded ahead, and never after a cancel."""

import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from varuna.data.collate import Sample
from varuna.data.loader import Loader
from varuna.data.samples import MicroBatch, SampleSource

WAIT_S = 20.0


class Gated(Dataset[Sample]):
    """Reads wait for a permit and are reported; indices from 100 on fail."""

    def __init__(self, *, open_: bool) -> None:
        self.started: queue.Queue[int] = queue.Queue()
        self.permits = threading.Semaphore(10**6 if open_ else 0)

    def __getitem__(self, index: int) -> Sample:
        self.started.put(index)
        assert self.permits.acquire(timeout=WAIT_S)
        if index >= 200:
            raise SystemExit("the dataset gave up")
        if index >= 100:
            raise ValueError("no such sample")
        return {"x": torch.tensor(index), "y": torch.tensor(-index)}


class Deliveries:
    """Receives deliveries."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[tuple[int, int, MicroBatch | BaseException]] = queue.Queue()

    def deliver(self, step: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
        self.arrived.put((step, micro_batch, batch))

    def next(self) -> tuple[int, int, Any]:
        return self.arrived.get(timeout=WAIT_S)


@pytest.fixture
def deliveries() -> Deliveries:
    return Deliveries()


@pytest.fixture
def gated() -> Gated:
    return Gated(open_=False)


@pytest.fixture
def fast(deliveries: Deliveries) -> Iterator[Loader]:
    loader = Loader(SampleSource(Gated(open_=True), seed=0), deliver=deliveries.deliver)
    yield loader
    loader.close(WAIT_S)


@pytest.fixture
def slow(deliveries: Deliveries, gated: Gated) -> Iterator[Loader]:
    others = set(threading.enumerate())
    loader = Loader(SampleSource(gated, seed=0), deliver=deliveries.deliver, lookahead=2)
    yield loader
    gated.permits.release(10**6)
    loader.close(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "varuna-loader" and thread not in others]


def test_micro_batches_come_in_the_order_requested(fast: Loader, deliveries: Deliveries) -> None:
    fast.request(7, [(0, [0, 1]), (2, [4])])
    fast.request(8, [(0, [6, 7])], keys=["x"])
    found = [deliveries.next() for _ in range(3)]
    assert [(step, number, batch.indices) for step, number, batch in found] == [
        (7, 0, (0, 1)),
        (7, 2, (4,)),
        (8, 0, (6, 7)),
    ]
    assert [list(batch.tensors) for _, _, batch in found] == [["x", "y"], ["x", "y"], ["x"]]


def test_no_more_than_the_lookahead_is_prepared_until_one_is_taken(
    slow: Loader, deliveries: Deliveries, gated: Gated
) -> None:
    gated.permits.release(10**6)
    slow.request(0, [(i, [i]) for i in range(4)])
    assert [deliveries.next()[1], deliveries.next()[1]] == [0, 1]
    with pytest.raises(queue.Empty):
        deliveries.arrived.get(timeout=0.05)
    slow.taken()
    assert deliveries.next()[1] == 2
    assert gated.started.qsize() == 3


def test_taking_too_often_does_not_widen_the_lookahead(slow: Loader, deliveries: Deliveries, gated: Gated) -> None:
    gated.permits.release(10**6)
    for _ in range(5):
        slow.taken()
    slow.request(0, [(i, [i]) for i in range(4)])
    deliveries.next(), deliveries.next()
    with pytest.raises(queue.Empty):
        deliveries.arrived.get(timeout=0.05)


def test_an_exception_comes_in_place_of_the_batch_and_work_goes_on(fast: Loader, deliveries: Deliveries) -> None:
    fast.request(0, [(0, [100]), (1, [1])])
    error = deliveries.next()[2]
    assert isinstance(error, ValueError)
    assert "dataset[100]" in error.__notes__[0]
    assert deliveries.next()[2].indices == (1,)


def test_a_dataset_that_exits_does_not_silence_the_loader(fast: Loader, deliveries: Deliveries) -> None:
    fast.request(0, [(0, [200]), (1, [1])])
    assert isinstance(deliveries.next()[2], SystemExit)
    assert deliveries.next()[1] == 1


def test_cancelled_work_is_never_delivered_even_if_it_was_being_read(
    slow: Loader, deliveries: Deliveries, gated: Gated
) -> None:
    slow.request(0, [(0, [0]), (1, [1])])
    assert gated.started.get(timeout=WAIT_S) == 0
    slow.cancel()
    slow.request(1, [(5, [5])])
    gated.permits.release(10**6)
    assert deliveries.next()[:2] == (1, 5)
    assert deliveries.arrived.empty()
    assert list(gated.started.queue) == [5]


def test_a_cancel_frees_the_slots_of_batches_that_nobody_took(
    slow: Loader, deliveries: Deliveries, gated: Gated
) -> None:
    gated.permits.release(10**6)
    slow.request(0, [(0, [0]), (1, [1]), (2, [2])])
    deliveries.next(), deliveries.next()
    slow.cancel()
    slow.request(1, [(0, [0]), (1, [1])])
    assert [deliveries.next()[:2], deliveries.next()[:2]] == [(1, 0), (1, 1)]


def test_a_cancel_waits_for_a_delivery_in_progress() -> None:
    entered, leave, delivered = threading.Event(), threading.Event(), []

    def deliver(_step: int, number: int, _batch: MicroBatch | BaseException) -> None:
        entered.set()
        assert leave.wait(WAIT_S)
        delivered.append(number)

    loader = Loader(SampleSource(Gated(open_=True), seed=0), deliver=deliver)
    loader.request(0, [(0, [0])])
    assert entered.wait(WAIT_S)
    loader.request(0, [(1, [1])])  # neither waits for the delivery
    loader.taken()
    canceller = threading.Thread(target=loader.cancel)
    canceller.start()
    canceller.join(0.05)
    assert canceller.is_alive()
    leave.set()
    canceller.join(WAIT_S)
    assert delivered == [0]
    loader.close(WAIT_S)


def test_deliver_may_cancel() -> None:
    delivered: queue.Queue[int] = queue.Queue()
    loader: Loader

    def deliver(_step: int, number: int, _batch: MicroBatch | BaseException) -> None:
        loader.cancel()
        delivered.put(number)

    loader = Loader(SampleSource(Gated(open_=True), seed=0), deliver=deliver, lookahead=1)
    loader.request(0, [(0, [0]), (1, [1])])
    assert delivered.get(timeout=WAIT_S) == 0
    loader.request(0, [(2, [2])])
    assert delivered.get(timeout=WAIT_S) == 2
    loader.close(WAIT_S)


def test_closing_does_not_wait_for_a_dataset_that_hangs(gated: Gated, deliveries: Deliveries) -> None:
    loader = Loader(SampleSource(gated, seed=0), deliver=deliveries.deliver)
    loader.request(0, [(0, [0])])
    gated.started.get(timeout=WAIT_S)
    loader.close(timeout_s=0.01)
    gated.permits.release(1)
    loader.close(WAIT_S)  # closing twice is fine
    assert deliveries.arrived.empty()


def test_a_delivered_batch_is_not_kept_alive(fast: Loader, deliveries: Deliveries) -> None:
    fast.request(0, [(0, [0])])
    _, _, batch = deliveries.next()
    tensor = weakref.ref(batch.tensors["x"])
    del batch
    fast.request(0, [(1, [1])])
    deliveries.next()
    gc.collect()
    assert tensor() is None
