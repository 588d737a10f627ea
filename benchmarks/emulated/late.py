"""Ranks that stand still now and then, on lines that are late or shut: all that may wait does wait, sooner or later."""

import random
import time
from typing import Any

import torch

from benchmarks.emulated.network import LARGE_BYTES, Line, Lines

LATE_S, LATE_ONE_OF = 0.1, 8
"""One of so many actions begins so late, and one of so many messages leaves so late; half of the others are under way
for half as long on average. Others get ahead meanwhile."""
SIEGE_S, SIEGE_ONE_OF = 1.2, 80
"""Before one of so many actions nothing leaves its rank for so long, and the rank stands still for half of that: all
that may come to it has come, and all that may wait to leave does."""
ACTIONS = frozenset("FRBIW")


class LateLines(Lines):
    """Lines that stand still now and then."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._open_s = 0.0

    def close(self, seconds: float) -> None:
        """Let nothing out for a while."""
        self._open_s = time.monotonic() + seconds

    def _pump(self, line: Line) -> None:
        while True:
            _, hand_over, passing, _ = line.get()
            while (left_s := self._open_s - time.monotonic()) > 0:
                time.sleep(left_s)
            if self._chance.random() < 1 / LATE_ONE_OF:
                time.sleep(LATE_S)
            elif self._chance.random() < 1 / 2:
                time.sleep(self._chance.expovariate(2 / LATE_S))
            hand_over()
            passing.arrive()


def be_late(rank: int) -> None:
    """Let this rank begin some of its actions late from now on, and some of its messages leave late."""
    from varuna.engine.base import spans
    from varuna.engine.base.transport import Group

    chance, real = random.Random(rank), Group.send
    lines = LateLines(chance)

    def hear(mark: Any) -> None:
        if mark.phase != "begin" or mark.name not in ACTIONS:
            return
        if chance.random() < 1 / SIEGE_ONE_OF:
            lines.close(SIEGE_S)
            time.sleep(SIEGE_S / 2)
        elif chance.random() < 1 / LATE_ONE_OF:
            time.sleep(LATE_S)

    def send(group: Group, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        if buffer.nbytes < LARGE_BYTES:
            return real(group, buffer, peer, tag)
        return lines.send((id(group), peer), lambda: real(group, buffer, peer, tag).wait())

    spans.subscribe(hear)
    setattr(Group, "send", send)  # noqa: B010 - mypy takes no assignment to a method
