"""Copies cross as a whole, whatever their size, and who cannot make one says so."""

import pytest
import torch

from tests.unit.engine.ranks import connected
from tests.waiting import wait_for
from varuna.core.errors import UsageError
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.still import StateGate
from varuna.engine.copies import wire
from varuna.engine.copies.layout import Body
from varuna.engine.copies.memory_checkpoints import CheckpointMaker, MemoryCheckpoints
from varuna.engine.copies.sending import CopiedStage, CopySender
from varuna.engine.device.host_copies import CPU_COPIES
from varuna.process.threads import start


@pytest.mark.parametrize("size_bytes", [0, 4, 8, 20, 1028, 4100])  # sums of an odd number of gradients, too
def test_a_body_of_any_size_arrives(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 1024)
    groups, inbox = connected(2), Inbox()
    body, found = (
        torch.arange(size_bytes, dtype=torch.int64).to(torch.uint8),
        torch.zeros(size_bytes, dtype=torch.uint8),
    )
    kept: list[bool] = []

    def keep() -> None:
        opening, header = wire.next_offer(wire.CopyChannel(groups[1], 0))
        assert header == b"what"
        wire.send_answer(wire.CopyChannel(groups[1], 0), yes=True)
        kept.append(wire.receive_parts(wire.CopyChannel(groups[1], 0), opening, Body.of_memory([found]).write))

    keeper = start("test-keeper", keep)

    def fill(first: int, part: torch.Tensor) -> bool:
        Body.of_memory([body]).read(first, part)
        return True

    opening = wire.offer_copy(wire.CopyChannel(groups[0], 1), wire.CopyKind.SUM, 3, b"what", size_bytes)
    assert opening is not None
    assert wire.send_parts(wire.CopyChannel(groups[0], 1), opening, fill, lambda part_s: None)
    keeper.join(20)
    assert kept == [True]
    assert torch.equal(found, body)
    inbox.abort(GenerationEnded(0))


@pytest.mark.parametrize("error", [RuntimeError("no memory for it"), UsageError("no memory for it")])
def test_a_copy_that_cannot_be_made_is_told_of(capfd: pytest.CaptureFixture[str], error: Exception) -> None:
    """Also where it is the state of the training loop that cannot be had."""
    groups, inbox, still = connected(2), Inbox(), StateGate(0)

    def fails() -> None:
        raise error

    maker = CheckpointMaker(
        MemoryCheckpoints(),
        generation=0,
        ranks=2,
        first_step=0,
        states=dict,
        still=still,
        copies=CPU_COPIES,
        delay=lambda copied: None,
        every_s=lambda stall_s: 0.0,
        inbox=inbox,
        rank=0,
        stage=0,
    )
    CopySender(groups[0], 1, CopiedStage(still, maker, None), inbox=inbox, steps=10, rank=0, stage=0)
    maker.begin_first_step(fails)
    said: list[str] = []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return "is not copied to another worker any more: no memory for it" in "".join(said)

    wait_for(is_said, 20)
    still.close()
    inbox.abort(GenerationEnded(0))
