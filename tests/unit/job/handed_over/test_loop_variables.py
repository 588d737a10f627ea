"""Variables that a loop takes from turn to turn are named when a run resumes; what it only writes or shows is not."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from varuna.job.handed_over.loop_variables import carried_names

KEPT: list[Any] = []


class Stopper:
    def __init__(self) -> None:
        self.patience, self.best, self.waited = 3, float("inf"), 0

    def __call__(self, loss: float) -> bool:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(loss, self.best)
        return self.waited > self.patience


def steps(found: list[str]) -> Iterator[float]:
    """Yield steps as the Trainer does, and look at the loop once in the middle of it."""
    for loss in (2.0, 1.0):
        found[:] = carried_names(sys._getframe(1), KEPT)
        yield loss


def counts(found: list[str]) -> None:
    best, waited, seen, last = float("inf"), 0, list[float](), 0.0
    for loss in steps(found):
        seen.append(loss)
        if loss < best:
            best, waited = loss, 0
        else:
            waited += 1
        last = loss
        print(last, waited, [each for each in seen if each > best])


def asks_an_object(found: list[str]) -> None:
    stop, limit = Stopper(), 5.0
    for number, loss in enumerate(steps(found)):
        if stop(loss) or loss > limit:
            print(number)
            break


def asks_an_object_that_is_kept(found: list[str]) -> None:
    stop = Stopper()
    KEPT.append(stop)
    for loss in steps(found):
        stop(loss)


def counts_by_hand(found: list[str]) -> None:
    losses, number = steps(found), 0
    while number < 2:
        print(next(losses))
        number += 1


class Experiment:
    def __init__(self) -> None:
        self.best, self.rate, self.name = 9.0, 0.1, "a"

    def train(self, found: list[str]) -> None:
        for epoch in range(1):
            for loss in steps(found):
                if loss < self.best:
                    self.best = loss
                print(epoch, self.rate)


worst = 0.0


def calls_functions(found: list[str]) -> None:
    best, stop, table = float("inf"), Stopper(), list[float]()

    def better(loss: float) -> bool:
        nonlocal best
        best = min(best, loss)
        return best == loss

    def note(loss: float, size: float = 0.0) -> None:
        global worst
        worst = max(worst, loss)
        size += loss
        table.append(size)

    def told(loss: float) -> None:
        print(better(loss), stop(loss))

    for loss in steps(found):
        told(loss)
        note(loss)


def shows(found: list[str]) -> None:
    table: dict[int, float] = {}
    for loss in steps(found):
        size = loss * 2
        table[len(table)] = size


def is_a_librarys(found: list[str]) -> None:
    total = 0.0
    total = sum(steps(found), total)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (counts, ["best", "waited"]),
        (asks_an_object, ["stop.best", "stop.waited"]),
        (asks_an_object_that_is_kept, []),
        (counts_by_hand, ["number"]),
        (Experiment().train, ["self.best"]),
        (calls_functions, ["best", "stop.best", "stop.waited", "worst"]),
        (shows, []),
        (is_a_librarys, []),
    ],
)
def test_names_of_what_a_loop_takes_from_turn_to_turn(loop: Callable[[list[str]], None], expected: list[str]) -> None:
    found = ["never asked"]
    loop(found)
    assert sorted(found) == expected
