"""A copy is complete or worth nothing, whatever happens on either side meanwhile."""

import threading
from collections.abc import Callable

import pytest
import torch

from tests.unit.engine.ranks import connected
from tests.waiting import wait_for
from varuna.checkpoint.io.section_state import SectionState
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.still import StateGate
from varuna.engine.copies import keeping, sending, wire
from varuna.engine.copies.keeping import CopyKeeper, KeptCopy
from varuna.engine.copies.layout import Body
from varuna.engine.copies.sending import CopiedStage, CopySender
from varuna.process.threads import start
from varuna.schedule import copy_pace

STEPS = 10


class Pair:
    """Rank 0 trains a section, and rank 1 keeps its copy; tests move both from step to step."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.groups, self.inboxes = connected(2), [Inbox(), Inbox()]
        self.value = torch.zeros(1000)
        self.owner, self.other, self.copy = StateGate(0), StateGate(0), KeptCopy()
        CopyKeeper(
            self.groups[1], 0, self.copy, sums_alone=False, inbox=self.inboxes[1], still=self.other, rank=1, stage=1
        )
        CopySender(
            self.groups[0],
            1,
            CopiedStage(
                self.owner,
                lambda: {2: SectionState(2, {"parameters/w": self.value}, {"scale": 3})},
                None,
                step_s=step_s,
            ),
            inbox=self.inboxes[0],
            steps=STEPS,
            rank=0,
            stage=0,
        )

    def update(self, *stills: StateGate, step: int) -> None:
        """Both, or one of them, apply a step."""
        for still in stills:
            still.changes()
            if still is self.owner:
                self.value.fill_(float(step))
            still.rests(step)

    def kept(self) -> int | None:
        """The step of the copy that is complete."""
        return self.copy._step

    def close(self) -> None:
        for still, inbox in zip((self.owner, self.other), self.inboxes, strict=True):
            still.close()
            inbox.abort(GenerationEnded(0))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def gated(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Semaphore, Callable[[], int]]:
    """Each part of a copy waits until the test lets it go; and how many were sent."""
    gate, sent = threading.Semaphore(0), []

    def pause_s(part_s: float, since_s: float, step_s: float) -> float:
        sent.append(part_s)
        gate.acquire(timeout=20)
        return 0.0

    monkeypatch.setattr(sending, "state_pause_s", pause_s)
    monkeypatch.setattr(wire, "PART_BYTES", 1024)  # of 4032
    return gate, lambda: len(sent)


def test_each_step_has_a_copy_which_the_next_one_replaces(pair: Pair) -> None:
    for step in range(3):
        wait_for(lambda step=step: pair.kept() == step, 10)  # type: ignore[misc]
        pair.update(pair.owner, pair.other, step=step + 1)
    wait_for(lambda: pair.kept() == 3, 10)
    assert pair.copy.seal(2) == {}, "of another step"
    found = pair.copy.seal(3)
    assert set(found[2].tensors["parameters/w"].tolist()) == {3.0}
    assert found[2].scalars == {"scale": 3}
    pair.close()


@pytest.mark.parametrize("step_s", [0.0, 1e6])
def test_a_copy_makes_no_pauses_at_the_begin_of_a_long_step(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """The first step of a generation is as long as planned, and others are as long as the one before."""
    monkeypatch.setattr(wire, "PART_BYTES", 1024)  # of 4032
    monkeypatch.setattr(copy_pace, "pause_s", lambda part_s: 0.001)
    pauses: list[float] = []
    steps_s: list[float] = []

    def pause_s(part_s: float, since_s: float, step_s: float) -> float:
        pauses.append(copy_pace.state_pause_s(part_s, since_s, step_s))
        steps_s.append(step_s)
        return pauses[-1]

    monkeypatch.setattr(sending, "state_pause_s", pause_s)
    pair = Pair(step_s)
    wait_for(lambda: pair.kept() == 0, 10)
    assert pauses == [0.0 if step_s else 0.001] * 3, "between four parts"
    pair.update(pair.owner, pair.other, step=1)
    wait_for(lambda: pair.kept() == 1, 10)
    assert steps_s[0] == step_s
    assert 0 < steps_s[-1] < 100
    pair.close()


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
        opening, header = wire.next_offer(wire.Line(groups[1], 0))
        assert header == b"what"
        wire.answer(wire.Line(groups[1], 0), yes=True)
        kept.append(wire.receive_parts(wire.Line(groups[1], 0), opening, Body.of_memory([found]).write))

    keeper = start("test-keeper", keep)

    def fill(first: int, part: torch.Tensor) -> bool:
        Body.of_memory([body]).read(first, part)
        return True

    opening = wire.offer(wire.Line(groups[0], 1), wire.CopyKind.SUM, 3, b"what", size_bytes)
    assert opening is not None
    assert wire.send_parts(wire.Line(groups[0], 1), opening, fill, lambda part_s: None)
    keeper.join(20)
    assert kept == [True]
    assert torch.equal(found, body)
    inbox.abort(GenerationEnded(0))


def test_a_copy_that_cannot_be_made_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    groups, inbox, still = connected(2), Inbox(), StateGate(0)

    def states() -> dict[int, SectionState]:
        raise RuntimeError("no memory for it")

    CopySender(groups[0], 1, CopiedStage(still, states, None), inbox=inbox, steps=STEPS, rank=0, stage=0)
    said: list[str] = []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return "no copy on another worker: no memory for it" in "".join(said)

    wait_for(is_said, 20)
    still.close()
    inbox.abort(GenerationEnded(0))


def test_a_copy_that_the_next_update_overtakes_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, sent = gated(monkeypatch)
    pair = Pair()
    gate.release()
    wait_for(lambda: sent() == 2, 10)
    pair.update(pair.owner, step=1)  # rank 1 has not got the vote yet
    gate.release(100)
    with pytest.raises(AssertionError):
        wait_for(lambda: pair.kept() is not None, 0.3)
    assert sent() == 2, "instead of the third part there was word of it"
    pair.update(pair.other, step=1)
    wait_for(lambda: pair.kept() == 1, 10)
    assert set(pair.copy.seal(1)[2].tensors["parameters/w"].tolist()) == {1.0}
    pair.close()


def test_the_old_copy_stays_until_its_keeper_has_the_vote(pair: Pair) -> None:
    """If the owner dies with the only result of a vote, the step runs again from the old state."""
    wait_for(lambda: pair.kept() == 0, 10)
    pair.update(pair.owner, step=1)
    with pytest.raises(AssertionError):
        wait_for(lambda: pair.kept() != 0, 0.3)
    assert set(pair.copy.seal(0)[2].tensors["parameters/w"].tolist()) == {0.0}
    pair.close()


def test_what_is_sealed_does_not_change_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, sent = gated(monkeypatch)
    pair = Pair()
    wait_for(lambda: sent() == 1, 10)
    assert pair.copy.seal(0) == {}
    gate.release(100)
    wait_for(lambda: sent() == 3, 10)
    pair.update(pair.owner, pair.other, step=1)
    with pytest.raises(AssertionError):
        wait_for(lambda: pair.kept() is not None, 0.3)
    pair.close()


def test_without_room_there_is_no_copy_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeping, "available_bytes", lambda: 8000)  # twice the copy is more
    pair, printed = Pair(), []

    def warned() -> bool:
        printed.append("".join(capfd.readouterr()))
        return "has no room for a copy of rank 0's state" in "".join(printed)

    wait_for(warned, 10)
    assert pair.kept() is None
    monkeypatch.setattr(keeping, "available_bytes", lambda: 9000)
    pair.update(pair.owner, pair.other, step=1)
    wait_for(lambda: pair.kept() == 1, 10)
    pair.close()
