"""Sections move between live ranks bit for bit, all at once, in any pattern."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from tests.unit.engine.late import LateStreams
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.ranks import connected
from varuna.checkpoint.io.frozen import FrozenParameters, restore_frozen
from varuna.checkpoint.io.section_state import SectionState, to_bytes
from varuna.core.devices import STAGING_BYTES
from varuna.core.errors import VarunaError
from varuna.core.messages import Transfer
from varuna.engine.device.host_copies import CPU_COPIES, HostCopies, StreamCopies
from varuna.engine.links.in_parts import part_bytes_for
from varuna.engine.worker.state_transfer import exchange_states
from varuna.testing import fail_at, run
from varuna.testing.threads import run_all
from varuna.trainer import Trainer


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
    size: int,
    transfers: list[Transfer],
    held: dict[int, dict[int, SectionState]],
    left_out: FrozenParameters | None = None,
    copies: HostCopies = CPU_COPIES,
) -> dict[int, dict[int, SectionState]]:
    groups = connected(size)
    received: dict[int, dict[int, SectionState]] = {}

    def work(rank: int) -> None:
        own = [each for each in transfers if rank in (each.source_rank, each.target_rank)]
        received[rank] = exchange_states(groups[rank], own, rank, held.get(rank, {}), left_out, copies=copies).states

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


def test_what_files_have_is_not_sent() -> None:
    state, left_out = state_of(3), FrozenParameters({"half", "transposed"})
    [found] = exchanged(2, [move(3, 0, 1)], {0: {3: state}}, left_out)[1].values()
    assert "parameters/w" not in found.tensors
    restore_frozen(
        {3: found},
        {3: ["w", "half"]},
        lambda names: {name: state.tensors[f"parameters/{name}"] for name in names},
        "rank 0",
    )
    assert_same(found, state)
    assert len(to_bytes(left_out.of(state))) < len(to_bytes(state)) - state.tensors["parameters/w"].nbytes + 100


class Frozen(SmallLanguage):
    """Its later layers do not learn."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[2:]:
            layer.requires_grad_(False)


@pytest.mark.nightly
def test_a_morph_reads_frozen_parameters_from_disk_and_moves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "base.safetensors"
    save_model(Frozen(), str(file))

    def script(spoils: bool = False) -> None:
        trainer = Trainer(Frozen, Tokens(size=32), adamw, 8, weights=file, micro_batch=2)
        for step in trainer.steps(4):
            if spoils and step.is_main and step.index == 1:
                save_model(Frozen(), str(file))

    alone = run(script)
    lived = run(script, workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=1, step=2, phase="B")])
    assert lived.plans == ("2x2", "3x1")
    assert lived.losses == pytest.approx(alone.losses, rel=1e-5)
    with pytest.raises(VarunaError, match="what another worker sent holds trained parameters only"):
        run(partial(script, spoils=True), workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=1, step=2, phase="B")])


def test_large_sections_cross_each_other_without_a_deadlock() -> None:
    held = {rank: {rank: state_of(rank, size=300_000)} for rank in range(2)}  # 3.6 MB: more than a socket takes
    received = exchanged(2, [move(0, 0, 1), move(1, 1, 0)], held)
    assert_same(received[1][0], held[0][0])
    assert_same(received[0][1], held[1][1])


def test_a_transfer_takes_host_memory_for_what_comes_and_64_mib() -> None:
    weight = torch.ones(3 * 2**24)
    held = {0: {section: SectionState(section, {"parameters/w": weight + section}) for section in range(2)}}
    size_bytes = 2 * weight.nbytes  # 403 MB
    Path("/proc/self/clear_refs").write_text("5")  # the most that was used is what is used now
    before_bytes = used_bytes("VmRSS")
    received = exchanged(2, [move(section, 0, 1) for section in range(2)], held)
    more_bytes = used_bytes("VmHWM") - before_bytes
    assert torch.equal(received[1][1].tensors["parameters/w"], weight + 1)
    assert size_bytes <= more_bytes <= size_bytes + STAGING_BYTES


def used_bytes(row: str) -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[row].split()[0]) * 1024


@pytest.mark.parametrize("targets", [1, 8, 1000])
def test_parts_for_any_number_of_targets_stay_within_the_bound(targets: int) -> None:
    assert 2 * targets * part_bytes_for(targets) <= STAGING_BYTES
    assert part_bytes_for(targets) % 64 == 0


def test_state_of_a_device_is_sent_once_it_has_arrived_in_host_memory() -> None:
    late = LateStreams()
    held = {0: {section: state_of(section, size=700_000) for section in range(2)}}
    received = exchanged(3, [move(section, 0, 1 + section) for section in range(2)], held, copies=StreamCopies(late))
    assert (late.copies > 8, late.left) == (True, 0)
    for section in range(2):
        assert_same(received[1 + section][section], held[0][section])


def test_what_stays_in_host_memory_does_not_hold_the_rest_there() -> None:
    received = exchanged(2, [move(2, 0, 1)], {0: {2: state_of(2)}})
    assert received[1][2].tensors["optimizer/w/step"].untyped_storage().nbytes() == 4


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
        exchange_states(groups[0], transfers, 0, {})
