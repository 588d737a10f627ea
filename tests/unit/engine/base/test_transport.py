"""Exchanges of a group: everybody's parts, in order, and asked for before anything is sent."""

import gc
import os
import time
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.unit.engine.ranks import connected
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, Work, local_store
from varuna.testing.threads import run_all


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_each_member_gets_its_part_of_everyones(members: int, dtype: torch.dtype) -> None:
    groups = connected(members)
    given = [torch.arange(3 * members).add(100 * member).remainder(200).to(dtype) for member in range(members)]
    parts: dict[int, Tensor] = {}

    def work(member: int) -> None:
        parts[member] = groups[member].exchange(given[member])

    run_all([partial(work, member) for member in range(members)])
    for member in range(members):
        mine = [each[3 * member : 3 * member + 3] for each in given]
        assert torch.equal(parts[member], torch.cat(mine))


class _Noting(Group):
    """A group that notes what it is asked to do."""

    calls: list[str]

    def send(self, buffer: Tensor, peer: int, tag: int) -> Work:
        self.calls.append("send")
        return super().send(buffer, peer, tag)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Work:
        self.calls.append("receive")
        return super().receive(buffer, peer, tag)


def test_parts_of_others_are_asked_for_before_ones_own_are_sent() -> None:
    store = local_store()
    groups: list[_Noting] = []

    def work(member: int) -> None:
        group = _Noting(store, "noting", member, 3, Endpoint("127.0.0.1"))
        group.calls = []
        groups.append(group)
        group.exchange(torch.zeros(6))
        group.all_reduce(torch.zeros(2))

    run_all([partial(work, member) for member in range(3)])
    assert [group.calls for group in groups] == [["receive", "receive", "send", "send"] * 2] * 3


class _Waiting(Work):
    """Waits as told, and notes for how long it may."""

    def __init__(self, work: Work, bounds_s: list[float]) -> None:
        super().__init__(work.buffer, lambda problem: None)
        self.inner, self.bounds_s = work, bounds_s

    def wait(self, bound_s: float = 0.0) -> Tensor:
        self.bounds_s.append(bound_s)
        time.sleep(0.01)
        return self.inner.wait(bound_s)


class _Bounded(Group):
    """A group that notes the bounds of its waits."""

    bounds_s: list[float]

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Work:
        return _Waiting(super().receive(buffer, peer, tag), self.bounds_s)


def test_all_waits_of_an_exchange_share_its_bound() -> None:
    store = local_store()
    groups: list[_Bounded] = []

    def work(member: int) -> None:
        group = _Bounded(store, "bounded", member, 3, Endpoint("127.0.0.1"))
        group.bounds_s = []
        groups.append(group)
        group.exchange(torch.zeros(6), bound_s=20.0)

    run_all([partial(work, member) for member in range(3)])
    for group in groups:
        first_s, second_s = group.bounds_s
        assert second_s < first_s <= 20.0


def test_a_member_that_says_nothing_ends_the_exchange_within_its_bound() -> None:
    groups = connected(2)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 s"):
        groups[0].exchange(torch.zeros(2), bound_s=0.3)


def values_of(member: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(member)).mul(1000).to(dtype)


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 4097, 12_345])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_sum_has_the_bits_of_adding_up_in_the_order_of_ranks(members: int, count: int, dtype: torch.dtype) -> None:
    """Small ones cross whole, others in shares, and those of more than ``at_once`` numbers in several turns."""
    given = [values_of(member, count, dtype) for member in range(members)]
    expected = given[0].clone()
    for other in given[1:]:
        expected += other
    groups = connected(members)
    run_all([partial(group.all_reduce, value, at_once=5000) for group, value in zip(groups, given, strict=True)])
    for value in given:
        assert torch.equal(value, expected)


def test_a_sum_of_any_form_is_made_in_place() -> None:
    groups = connected(2)
    given = [torch.full((3, 5), 1.0), torch.full((3, 5), 2.0)]
    run_all([partial(group.all_reduce, value[1:]) for group, value in zip(groups, given, strict=True)])
    for member, value in enumerate(given):
        assert value.tolist() == [[1.0 + member] * 5, [3.0] * 5, [3.0] * 5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_that_ends_cuts_nothing() -> None:
    """It has this one's sockets; a script may fork, and its child end as any process does."""
    groups = connected(2)
    child = os.fork()
    if not child:  # no test goes on here
        try:
            groups.clear()
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    work = groups[1].receive(torch.zeros(1), 0, 1)
    groups[0].send(torch.ones(1), 1, 1).wait(20)
    assert work.wait(20).item() == 1.0
