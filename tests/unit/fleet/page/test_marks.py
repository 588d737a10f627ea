"""A week's story in bounded memory: nothing that happened is uncounted."""

from collections import Counter
from typing import Any

from tests.depth import by_depth
from varuna.fleet.page.chronicle import MarkHistory
from varuna.fleet.page.story import Kind, Mark


def mark(number: int, kind: Kind = "morph", time_s: float | None = None) -> Mark:
    return Mark(kind, f"sentence {number}", float(number) if time_s is None else time_s, number)


def rows(history: MarkHistory) -> list[Any]:
    found = history.older()["rows"]
    assert isinstance(found, list)
    return found


def counted(history: MarkHistory) -> Counter[str]:
    found: Counter[str] = Counter(str(each["kind"]) for each in history.newest())
    for *_, counts in rows(history):
        found += Counter(counts)
    return found


def test_few_sentences_are_kept_whole() -> None:
    history = MarkHistory(most=3)
    for number in range(3):
        history.add_mark(mark(number))
    assert [each["text"] for each in history.newest()] == ["sentence 0", "sentence 1", "sentence 2"]
    assert [each["text"] for each in history.newest(2)] == ["sentence 1", "sentence 2"]
    assert rows(history) == []


def test_older_ones_are_counted_where_they_were_and_nothing_grows() -> None:
    history = MarkHistory(most=20, most_buckets=50)
    kinds: tuple[Kind, ...] = ("morph", "lost", "checkpoint")
    most = by_depth(3_000, 30_000)
    for number in range(most):
        history.add_mark(mark(number, kinds[number % 3], 20.0 * number))
        assert len(rows(history)) <= 50
    assert counted(history) == dict.fromkeys(kinds, most // 3)
    assert len(rows(history)) > 20
    assert rows(history)[0][0] == 0.0
    begins = [row[0] for row in rows(history)]
    assert begins == sorted(begins)
    assert all(began_s <= ended_s for began_s, ended_s, *_ in rows(history))
    assert rows(history)[-1][2] == most - 21


def test_a_clock_that_is_set_back_neither_loses_nor_multiplies_anything() -> None:
    history = MarkHistory(most=1, most_buckets=4)
    for number in range(1000):
        history.add_mark(mark(number, time_s=1000.0 - number if number % 2 else 1000.0 + number))
    assert counted(history) == {"morph": 1000}
    assert len(rows(history)) <= 4


def test_sentences_before_the_first_step_have_no_step() -> None:
    history = MarkHistory(most=1)
    for time_s, step in ((1.0, None), (1.1, None), (5.0, 3), (5.1, None), (9.0, 4)):
        history.add_mark(Mark("notice", "", time_s, step))
    assert [row[2] for row in rows(history)] == [None, 3]
