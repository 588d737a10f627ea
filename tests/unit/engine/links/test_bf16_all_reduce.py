"""Gradients that cross between replicas as bf16: half the bytes, the same bits everywhere, near those of fp32."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.depth import by_depth, nightly
from tests.unit.engine.models import SmallLanguage, Tokens
from tests.unit.engine.plain import worst
from tests.unit.engine.ranks import Setup, connected
from varuna.core.precision import Precision
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, Work, local_store
from varuna.testing.threads import run_all


def values_of(member: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(member))


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize(("count", "at_once"), [(1, 8), (7, 8), (23, 8), (30_001, 2**22)])
def test_all_members_get_the_sum_of_rounded_values_in_their_order(members: int, count: int, at_once: int) -> None:
    given = [values_of(member, count) for member in range(members)]
    expected = given[0].bfloat16().float()
    for other in given[1:]:
        expected = expected + other.bfloat16().float()
    groups = connected(members)
    run_all(
        [
            partial(group.all_reduce, value, crossing=torch.bfloat16, at_once=at_once)
            for group, value in zip(groups, given, strict=True)
        ]
    )
    for value in given:
        assert torch.equal(value, expected.bfloat16().float())


class _Counting(Group):
    """A group that counts the bytes that leave this member."""

    left_bytes = 0

    def send(self, buffer: Tensor, peer: int, tag: int) -> Work:
        self.left_bytes += buffer.nbytes
        return super().send(buffer, peer, tag)


def test_half_the_bytes_of_a_ring_of_fp32_leave() -> None:
    store, left_bytes, count = local_store(), [], 40_000

    def work(member: int) -> None:
        group = _Counting(store, "counting", member, 4, Endpoint("127.0.0.1"))
        group.all_reduce(torch.ones(count), crossing=torch.bfloat16)
        left_bytes.append(group.left_bytes)

    run_all([partial(work, member) for member in range(4)])
    ring_bytes = 2 * 3 * count * 4 // 4
    assert left_bytes == [ring_bytes // 2] * 4


@pytest.mark.parametrize("precision", ["fp32", *nightly("bf16")])
def test_losses_are_near_those_of_fp32_and_the_same_in_every_run_and_at_every_depth(precision: Precision) -> None:
    whole = Setup(build=SmallLanguage, dataset=Tokens(padded=True), micro_batch=1, precision=precision)
    less = replace(whole, rounds=True)
    expected = whole.losses(1, 1)
    assert less.losses(1, 1) == expected  # nothing crosses
    curves = {}
    for replicas in by_depth((2,), (2, 3)):
        found = curves[replicas] = less.losses(1, replicas)
        assert found != whole.losses(1, replicas)
        assert worst([(loss, loss) for loss, _ in found], [(loss, loss) for loss, _ in expected]) < 1e-4
        assert worst(found, expected) < 2**-8  # norms of gradients
    assert less.losses(by_depth(2, 3), 2) == curves[2]


def test_replicas_keep_the_same_parameters() -> None:
    setup = Setup(build=SmallLanguage, micro_batch=1, rounds=True)
    setup.run(1, 3, steps=by_depth(2, 3))
    stages = [session.current.stage for session in setup.finished if session.current is not None]
    assert len(stages) == 3
    for name, value in stages[0].parameters.items():
        assert all(torch.equal(stage.parameters[name], value) for stage in stages[1:])
