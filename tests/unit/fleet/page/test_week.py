"""Costs of a week of 300 workers to a manager and each page: counted, and bounded whatever happens."""

import sys
from collections import deque
from collections.abc import Iterable, Mapping

import pytest

from tests.depth import by_depth
from tests.simulated_week import STEPS, WORKERS, Week
from varuna.fleet.page.live_feed import LiveFeed

WEEKS = by_depth(0.1, 1)
MOST_FIRST_BYTES = 700_000
MOST_KEPT_BYTES = 8 * 2**20
MOST_BYTES_OF_A_SECOND = 200 * len(WORKERS)


def kept_bytes(value: object, seen: set[int]) -> int:
    """Memory of a value and of all that only it leads to."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    inside: Iterable[object] = ()
    if isinstance(value, Mapping):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | deque | set):
        inside = value
    elif type(value).__module__.startswith("varuna"):
        slots = [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
        inside = (*slots, *vars(value).values()) if hasattr(value, "__dict__") else slots
    return size + sum(kept_bytes(each, seen) for each in inside)


@pytest.fixture(scope="module")
def week() -> Week:
    return Week(WEEKS)


def test_the_first_answer_and_what_the_manager_keeps_are_bounded(week: Week) -> None:
    first = len(LiveFeed(week.chronicle, week.status).stream("", lambda: True).news())
    kept = kept_bytes(week.chronicle, set())
    print(f"{first} bytes at first, {kept} bytes kept")
    assert first < MOST_FIRST_BYTES
    assert kept < MOST_KEPT_BYTES


def test_twice_as_long_a_run_costs_no_more(week: Week) -> None:
    longer = Week(2 * WEEKS)
    one, two = (kept_bytes(each.chronicle, set()) for each in (week, longer))
    assert two < 1.5 * one  # buckets are half full at worst, and full at best
    number, whole = longer.chronicle.describe()
    assert number > 2 * WEEKS * STEPS
    lengths = {key: len(value) for key, value in whole.items() if isinstance(value, list)}
    assert lengths["bands"] <= 1000
    assert lengths["marks"] <= 600


def test_a_second_in_which_every_worker_does_something_else_costs_some_bytes_each(week: Week) -> None:
    now_s = 0.0
    feed = LiveFeed(week.chronicle, week.status, lambda: now_s)
    page = feed.stream("", lambda: True)
    page.news()
    told = []
    for week.seconds in range(1, 4):
        now_s += 1.0
        told.append(len(page.news()))
    print(f"{told} bytes in a second")
    assert max(told) < MOST_BYTES_OF_A_SECOND
