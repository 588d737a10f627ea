"""Sections move between live ranks bit for bit, all at once, in any pattern."""

from functools import partial

import pytest
import torch

from tests.unit.engine.ranks import connected, run_all
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.messages import Transfer
from varuna.engine.worker.state_transfer import exchange


def state_of(section: int, *, size: int = 1000) -> SectionState:
    generator = torch.Generator().manual_seed(section)
    weight = torch.randn(size + section, 3, generator=generator)
    weight.view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    tensors = {
        "parameters/w": weight,
        "parameters/half": weight[:7].to(torch.bfloat16),
        "parameters/transposed": weight.t(),
        "optimizer/w/step": torch.tensor(float(section)),
        "optimizer/w/empty": torch.empty(0, 4),
        "optimizer/w/mask": weight[:5] > 0,
    }
    return SectionState(section, tensors, {"optimizer/w/eta": float("inf"), "optimizer/w/flag": True})


def assert_same(found: SectionState, expected: SectionState) -> None:
    assert found.section == expected.section
    assert found.scalars == expected.scalars
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape) == (value.dtype, value.shape)
        assert torch.equal(
            other.contiguous().reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8)
        ), name


def exchanged(
    size: int, transfers: list[Transfer], held: dict[int, dict[int, SectionState]]
) -> dict[int, dict[int, SectionState]]:
    groups = connected(size)
    received: dict[int, dict[int, SectionState]] = {}

    def work(rank: int) -> None:
        own = [each for each in transfers if rank in (each.source_rank, each.target_rank)]
        received[rank] = exchange(groups[rank], own, rank, held.get(rank, {}))

    run_all([partial(work, rank) for rank in range(size)])
    return received


def move(section: int, source: int, target: int) -> Transfer:
    return Transfer(section=section, source_rank=source, target_rank=target)


def test_several_sections_between_three_ranks_in_all_directions_at_once() -> None:
    held = {rank: {section: state_of(section) for section in range(rank, 12, 3)} for rank in range(3)}
    transfers = [
        move(section, section % 3, target) for section in range(12) for target in range(3) if target != section % 3
    ]
    for order in (transfers, transfers[::-1]):
        received = exchanged(3, order, held)
        for rank in range(3):
            assert sorted(received[rank]) == [section for section in range(12) if section % 3 != rank]
            for section, state in received[rank].items():
                assert_same(state, state_of(section))


def test_large_sections_cross_each_other_without_a_deadlock() -> None:
    held = {rank: {rank: state_of(rank, size=300_000)} for rank in range(2)}  # 3.6 MB: more than a socket takes
    received = exchanged(2, [move(0, 0, 1), move(1, 1, 0)], held)
    assert_same(received[1][0], held[0][0])
    assert_same(received[0][1], held[1][1])


def test_a_rank_without_a_part_receives_nothing_and_what_is_received_is_a_copy() -> None:
    mine = state_of(5)
    received = exchanged(3, [move(5, 2, 0)], {2: {5: mine}})
    assert (received[1], received[2]) == ({}, {})
    before = mine.tensors["parameters/w"].clone()
    received[0][5].tensors["parameters/w"].zero_()
    assert torch.equal(mine.tensors["parameters/w"].nan_to_num(), before.nan_to_num())


def test_a_source_that_vanishes_ends_the_exchange() -> None:
    groups = connected(2)
    transfers = [move(0, 1, 0)]
    del groups[1]
    with pytest.raises(RuntimeError):
        exchange(groups[0], transfers, 0, {})
