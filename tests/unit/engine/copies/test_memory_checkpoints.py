"""A memory checkpoint is everywhere or not needed: what came of it to others, what is dropped, and when."""

import threading
from collections.abc import Sequence

import pytest
import torch

from tests.unit.engine.ranks import connected
from tests.waiting import wait_for
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.vote import StepTotals
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.still import StateGate
from varuna.engine.copies import memory_checkpoints, sending, wire
from varuna.engine.copies.keeping import CopyKeeper, KeptSums
from varuna.engine.copies.memory_checkpoints import CheckpointMaker, MemoryCheckpoints
from varuna.engine.copies.sending import CopiedStage, CopySender
from varuna.engine.device.host_copies import CPU_COPIES

RANKS = 2


class Ranks:
    """Two ranks, each with one section, that keep each other's memory checkpoints; a test casts their votes."""

    def __init__(self, *, every_s: float = 0.0, widths: Sequence[int] = (1000, 1000)) -> None:
        self.groups, self.inboxes = connected(RANKS), [Inbox() for _ in range(RANKS)]
        self.values = [torch.zeros(width) for width in widths]
        self.memories = [MemoryCheckpoints() for _ in range(RANKS)]
        self.stills = [StateGate(0) for _ in range(RANKS)]
        self.copies = [self._copies(rank, every_s) for rank in range(RANKS)]
        for rank in range(RANKS):
            self._keep(rank)

    def _copies(self, rank: int, every_s: float) -> CheckpointMaker:
        value = self.values[rank]
        return CheckpointMaker(
            self.memories[rank],
            generation=3,
            ranks=RANKS,
            first_step=0,
            states=lambda: {rank: SectionState(rank, {"parameters/w": value, "n": torch.tensor(7)}, {"scale": rank})},
            still=self.stills[rank],
            copies=CPU_COPIES,
            delay=lambda copied: None,
            every_s=lambda stall_s: every_s,
            inbox=self.inboxes[rank],
            rank=rank,
            stage=rank,
        )

    def _keep(self, rank: int) -> None:
        other, inbox, still = 1 - rank, self.inboxes[rank], self.stills[rank]
        where = {"inbox": inbox, "rank": rank, "stage": rank}
        kept = self.memories[rank], KeptSums()
        CopyKeeper(self.groups[rank], other, *kept, generation=3, still=still, **where)  # type: ignore[arg-type]
        copied = CopiedStage(still, self.copies[rank], None)
        CopySender(self.groups[rank], other, copied, steps=100, **where)  # type: ignore[arg-type]

    def begin(self, *ranks: int) -> None:
        """The generation's first step begins."""
        for rank in ranks or range(RANKS):
            self.copies[rank].begin_first_step(lambda: {"turns": 0})

    def step(self, step: int, *ranks: int) -> StepTotals:
        """Cast a vote, and let some ranks apply the step and do what it decides; all, if none are named."""
        said = [copies.flags() for copies in self.copies]
        totals = StepTotals(
            loss=0.0,
            weight=1.0,
            grad_norm=0.0,
            metrics={},
            stop=False,
            regroup=False,
            checkpoint=False,
            keep=int(said[0]["keep"]),
            kept=int(sum(each["kept"] for each in said)),
            lr=0.0,
        )
        for rank in ranks or range(RANKS):
            self.learn(rank, step, totals)
        return totals

    def learn(self, rank: int, step: int, totals: StepTotals) -> None:
        self.stills[rank].close_for_update()
        self.values[rank].fill_(float(step))
        self.stills[rank].open_at(step)
        self.copies[rank].follow_vote(totals, step, lambda: {"turns": step})

    def are_there(self) -> bool:
        return all(copies.flags()["kept"] for copies in self.copies)

    def steps(self, rank: int, section: int) -> list[int]:
        return [each.step for each in self.memories[rank].held() if section in each.sections]

    def close(self) -> None:
        for copies, inbox, still in zip(self.copies, self.inboxes, self.stills, strict=True):
            inbox.abort(GenerationEnded(3))
            still.close()
            copies.close()


@pytest.fixture
def ranks() -> Ranks:
    """All have what the generation began with."""
    found = Ranks()
    found.begin()
    wait_for(found.are_there, 10)
    return found


def test_the_first_is_of_the_state_that_the_generation_began_with(ranks: Ranks) -> None:
    assert ranks.steps(0, 1) == ranks.steps(1, 0) == [0]
    assert ranks.memories[1].loop(0) == (True, {"turns": 0})
    assert ranks.step(1).kept == RANKS, "in a long step there is a copy of it before the vote"
    ranks.close()


def test_the_first_is_made_once_all_of_its_state_is_there() -> None:
    ranks = Ranks()
    ranks.stills[0].close_for_update()  # some of it is still to come
    ranks.begin()
    wait_for(lambda: ranks.steps(0, 1) == [0], 10)
    assert ranks.steps(1, 0) == []
    ranks.values[0].fill_(9.0)
    ranks.stills[0].open_at(0)
    wait_for(lambda: ranks.steps(1, 0) == [0], 10)
    assert set(ranks.memories[1].states(0)[0].tensors["parameters/w"].tolist()) == {9.0}
    ranks.close()


def test_the_first_is_made_before_the_vote_at_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the step is: else ranks would not agree on which is the newest."""
    late = threading.Event()
    monkeypatch.setattr(StateGate, "wait_beyond", lambda *_: late.wait(10))  # who would make it beside the training
    ranks = Ranks(every_s=1000.0)
    ranks.begin()
    assert not any(memory.held() for memory in ranks.memories)
    assert [copies.flags() for copies in ranks.copies] == [{"kept": 0.0, "keep": 0.0}] * RANKS
    for value in ranks.values:
        value.fill_(9.0)
    late.set()
    wait_for(ranks.are_there, 10)
    assert ranks.steps(0, 1) == ranks.steps(1, 0) == [0]
    assert set(ranks.memories[1].states(0)[0].tensors["parameters/w"].tolist()) == {0.0}
    ranks.close()


def test_a_step_that_is_broken_off_again_and_again_is_kept_once() -> None:
    memory, state = MemoryCheckpoints(), SectionState(0, {"parameters/w": torch.ones(3)})
    for generation in range(20):
        assert memory.make(generation, 5, {0: state}, CPU_COPIES, None) is not None
        assert memory.complete_own(generation, 5)
        memory.keep_only((5,))
    assert [(each.generation, each.step) for each in memory.held()] == [(19, 5)]


def test_the_one_before_is_dropped_once_all_know_that_the_next_is_everywhere(ranks: Ranks) -> None:
    assert ranks.step(1).keep
    wait_for(ranks.are_there, 10)
    assert ranks.step(2).kept == RANKS
    wait_for(ranks.are_there, 10)
    assert ranks.steps(0, 1) == ranks.steps(1, 0) == [1, 2], "the newer one is everywhere, but no rank knows it yet"
    totals = ranks.step(3, 0)
    assert ranks.steps(0, 1)[0] == 2
    wait_for(lambda: 3 in ranks.steps(1, 0), 10)  # rank 0 has sent its next one already
    ranks.learn(1, 3, totals)
    wait_for(ranks.are_there, 10)
    assert ranks.steps(1, 0) == ranks.steps(0, 1) == [2, 3], "and rank 1, which hears of it later, does not drop that"
    ranks.close()


def test_it_is_the_state_of_its_step_whatever_is_trained_since(ranks: Ranks) -> None:
    ranks.step(5)
    wait_for(ranks.are_there, 10)
    for value in ranks.values:
        value.fill_(-1.0)
    for memory in ranks.memories:
        found = memory.states(5)
        assert {section: set(state.tensors["parameters/w"].tolist()) for section, state in found.items()} == {
            0: {5.0},
            1: {5.0},
        }
        assert [(state.tensors["n"].item(), state.scalars["scale"]) for _, state in sorted(found.items())] == [
            (7, 0),
            (7, 1),
        ]
        assert memory.loop(5) == (True, {"turns": 5})
        assert memory.loop(4) == (False, None)
    ranks.close()


def test_one_at_a_time_and_no_more_often_than_they_pay() -> None:
    ranks = Ranks(every_s=1000.0)
    ranks.begin()
    assert [ranks.step(step).keep for step in range(1, 4)] == [0, 0, 0]
    wait_for(ranks.are_there, 10)
    assert not ranks.step(4).keep
    assert ranks.steps(0, 1) == [0]
    ranks.close()


def test_a_keeper_without_room_keeps_what_it_has(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.step(1)
    wait_for(ranks.are_there, 10)
    ranks.step(2)
    wait_for(ranks.are_there, 10)
    monkeypatch.setattr(memory_checkpoints, "has_room", lambda size_bytes: False)
    ranks.memories[1].keep_only(())  # and with it the memory that would be used again
    ranks.step(3)
    wait_for(lambda: "has no room" in capsys.readouterr().err, 10)
    assert ranks.step(4).kept < RANKS
    assert 2 in ranks.steps(0, 0), "what all had before stays"
    ranks.close()


def test_a_rank_without_room_for_its_own_says_no_more_that_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would drop the one before, of which alone there is all state."""
    ranks = Ranks(widths=(2000, 1000))
    ranks.begin()
    wait_for(ranks.are_there, 10)
    monkeypatch.setattr(memory_checkpoints, "has_room", lambda size_bytes: size_bytes < 6000)
    ranks.step(1)
    wait_for(lambda: 1 in ranks.steps(0, 1) and 1 in ranks.steps(1, 1), 10)
    assert max(ranks.step(step).kept for step in (2, 3)) < RANKS
    assert all(0 in ranks.steps(rank, section) for rank in range(RANKS) for section in range(RANKS))
    ranks.close()


def test_what_is_still_being_copied_from_a_device_is_not_there(ranks: Ranks) -> None:
    """Its memory may be as it was."""
    ranks.close()
    wait_for(lambda: all(inbox.ended for inbox in ranks.inboxes), 10)
    memory, state = MemoryCheckpoints(), SectionState(0, {"parameters/w": torch.ones(3)})
    assert memory.make(3, 5, {0: state}, CPU_COPIES, None) is not None
    assert memory.held() == ()
    assert memory.states(5) == {}
    assert memory.complete_own(3, 5)
    assert [each.step for each in memory.held()] == [5]
    assert not memory.complete_own(3, 6)


def test_one_that_never_comes_is_given_up_for_a_newer(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it may still be on its way, and is thrown away."""
    ranks.step(1)
    wait_for(ranks.are_there, 10)
    monkeypatch.setattr(wire, "SMALL_PART_BYTES", 1024)
    pauses: list[float] = []

    def stuck(part_s: float, since_s: float, every_s: float) -> float:
        pauses.append(part_s)
        return 0.2

    monkeypatch.setattr(sending, "state_pause_s", stuck)
    ranks.step(2)
    wait_for(lambda: len(pauses) > 1, 10)
    monkeypatch.setattr(sending, "state_pause_s", lambda *_: 0.0)
    assert ranks.step(3).keep, "nothing is waited for, since they may be made at any time"
    wait_for(ranks.are_there, 10)
    ranks.step(4)
    assert ranks.steps(0, 1)[0] == 3
    found = ranks.memories[1].states(3)
    assert set(found[0].tensors["parameters/w"].tolist()) == {3.0}
    ranks.close()


def test_what_the_run_may_go_back_to_outlives_the_generation(ranks: Ranks) -> None:
    for step in (1, 2, 3):
        ranks.step(step)
        wait_for(ranks.are_there, 10)
    ranks.close()
    memory = ranks.memories[0]
    assert [each.step for each in memory.held()] == [2, 3]
    memory.keep_only((2,))
    assert [(each.generation, each.step, each.sections) for each in memory.held()] == [(3, 2, (0, 1))]
    memory.keep_only(())
    assert memory.held() == ()
