"""What the manager asks of a rank, on a thread that is not the training one."""

import threading
from typing import Any, cast

from varuna.core.membership import Membership
from varuna.core.messages import Flag, Held
from varuna.engine.base.inbox import Inbox
from varuna.engine.worker.worker_state import WorkerState


class Disturbed(dict[Flag, int]):
    """The next flag arrives in the very moment in which this one is looked at."""

    def __init__(self, standing: WorkerState) -> None:
        self.arriving = threading.Thread(target=standing.on_flag, args=(0, "checkpoint"), daemon=True)

    def get(self, key: Flag, default: Any = None) -> Any:
        found = super().get(key, default)
        if not self.arriving.ident:
            self.arriving.start()
            self.arriving.join(0.05)  # it may have to wait until we have looked
        return found


def entered() -> WorkerState:
    standing = WorkerState(cast(Membership, None))  # nothing is reported here
    standing.enter(0, Inbox(), 0)
    return standing


def test_a_checkpoint_is_asked_for_once() -> None:
    standing = entered()
    standing.on_flag(0, "checkpoint")
    assert [standing.asked("checkpoint") for _ in range(2)] == [True, False]


def test_a_flag_that_arrives_while_the_rank_looks_is_not_lost() -> None:
    standing = entered()
    flags = standing._asked = Disturbed(standing)
    before = standing.asked("checkpoint")
    flags.arriving.join(5)
    assert [before, standing.asked("checkpoint")].count(True) == 1


class Listening:
    """The manager's ear."""

    recorded_step = -1

    def __init__(self) -> None:
        self.heard: list[Held] = []

    def held(self, held: Held) -> None:
        self.heard.append(held)


def test_a_spare_answers_a_hold_that_comes_when_its_generation_has_just_formed() -> None:
    membership = Listening()
    standing = WorkerState(cast(Membership, membership))
    standing.enter(3, Inbox(), 0)
    standing.on_hold(3)  # its training thread has taken what was formed, and waits for nothing any more
    assert not membership.heard
    standing.take(None)
    assert [(held.generation, held.next_step) for held in membership.heard] == [(3, None)]
