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
from varuna.engine.base.transport import Group
from varuna.engine.links.bf16_all_reduce import all_reduce_rounded
from varuna.testing.threads import run_all


def values_of(member: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(member))


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 7, 23])
def test_all_members_get_the_sum_of_rounded_values_in_their_order(members: int, count: int) -> None:
    given = [values_of(member, count) for member in range(members)]
    expected = given[0].bfloat16().float()
    for other in given[1:]:
        expected = expected + other.bfloat16().float()
    groups = connected(members)
    run_all([partial(all_reduce_rounded, group, value, 8) for group, value in zip(groups, given, strict=True)])
    for value in given:
        assert torch.equal(value, expected.bfloat16().float())


class Counting:
    """A group that counts the bytes that leave this member."""

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.left_bytes = group, group.size, 0

    def exchange(self, values: Tensor) -> Tensor:
        self.left_bytes += values.nbytes * (self.size - 1) // self.size
        return self.group.exchange(values)

    def gather(self, part: Tensor) -> Tensor:
        self.left_bytes += part.nbytes * (self.size - 1)
        return self.group.gather(part)


def test_half_the_bytes_of_a_ring_of_fp32_leave() -> None:
    groups = [Counting(group) for group in connected(4)]
    run_all([partial(all_reduce_rounded, group, torch.ones(4000)) for group in groups])  # type: ignore[arg-type]
    ring_bytes = 2 * 3 * 4000 * 4 // 4
    assert [group.left_bytes for group in groups] == [ring_bytes // 2] * 4


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
