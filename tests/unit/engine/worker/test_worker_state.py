"""Requests of the manager to a rank, on a thread that is not the training one."""

import threading
from typing import cast

import pytest

from varuna.core.membership import Membership
from varuna.core.messages import StopReport
from varuna.engine.base.inbox import Inbox
from varuna.engine.worker.worker_state import WorkerState


class Disturbed(int):
    """A flag's generation; the next flag arrives in the very moment in which it is looked at."""

    arriving: threading.Thread

    def __eq__(self, other: object) -> bool:
        if not self.arriving.ident:
            self.arriving.start()
            self.arriving.join(0.05)  # it may have to wait until we have looked
        return super().__eq__(other)

    __hash__ = int.__hash__


def entered() -> WorkerState:
    standing = WorkerState(cast(Membership, None))  # nothing is reported here
    standing.enter(0, Inbox(), 0)
    return standing


def test_a_checkpoint_is_asked_for_once() -> None:
    standing = entered()
    standing.on_flag(0, "checkpoint")
    assert [standing.is_flag_asked("checkpoint") for _ in range(2)] == [True, False]


@pytest.mark.parametrize("generation", [-1, 0])
def test_a_flag_that_arrives_while_the_rank_looks_at_another_is_not_lost(generation: int) -> None:
    standing, earlier = entered(), Disturbed(generation)
    earlier.arriving = threading.Thread(target=standing.on_flag, args=(0, "checkpoint"), daemon=True)
    standing.on_flag(earlier, "checkpoint")
    before = standing.is_flag_asked("checkpoint")
    earlier.arriving.join(5)
    assert [before, standing.is_flag_asked("checkpoint")] == [generation == 0, True]


class Listening:
    """The manager's ear."""

    recorded_step = -1

    def __init__(self) -> None:
        self.heard: list[StopReport] = []

    def held(self, held: StopReport) -> None:
        self.heard.append(held)


def test_a_spare_answers_a_hold_that_comes_when_its_generation_has_just_formed() -> None:
    membership = Listening()
    standing = WorkerState(cast(Membership, membership))
    standing.enter(3, Inbox(), 0)
    standing.on_hold(3)  # its training thread has taken what was formed, and waits for nothing any more
    assert not membership.heard
    standing.hold_stage(None)
    assert [(held.generation, held.next_step) for held in membership.heard] == [(3, None)]
