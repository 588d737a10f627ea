"""A step uses fresh samples, the oldest first, each once, and counts those that have become too old."""

from hypothesis import given
from hypothesis import strategies as st

from varuna.extras.rollouts.order import Appended, Row, usable, versions

OBJECTS = st.lists(
    st.builds(Appended, st.integers(0, 9), st.uuids().map(str), st.integers(1, 4)),
    max_size=20,
    unique_by=lambda o: o[1],
)


def test_versions_reach_from_the_bound_to_the_step() -> None:
    assert list(versions(2, 5)) == [0, 1, 2]
    assert list(versions(9, 2)) == [7, 8, 9]
    assert list(versions(9, 0)) == [9]


def test_the_oldest_come_first_and_what_is_too_old_or_too_new_is_left() -> None:
    appended = [Appended(4, "d", 1), Appended(2, "b", 2), Appended(1, "a", 3), Appended(3, "c", 1), Appended(5, "e", 1)]
    found = usable(4, 2, appended, {("b", 0), ("a", 1)})
    assert found.rows == (("b", 1), ("c", 0), ("d", 0))
    assert found.skipped == 2


@given(OBJECTS, st.integers(0, 4), st.integers(1, 5))
def test_over_a_run_each_sample_is_used_once_within_the_bound_or_skipped_once(
    appended: list[Appended], staleness: int, batch: int
) -> None:
    orders: list[tuple[Row, ...]] = []
    skipped = 0
    for step in range(20):
        window = range(max(0, step - staleness - 1), step + 1)
        used = {row for before in window[:-1] for row in orders[before]}
        found = usable(step, staleness, [each for each in appended if each.version in window], used)
        orders.append(found.rows[:batch])
        skipped += found.skipped
    version = {each.name: each.version for each in appended}
    rows = [row for order in orders for row in order]
    assert len(set(rows)) == len(rows)
    assert all(0 <= step - version[name] <= staleness for step, order in enumerate(orders) for name, _ in order)
    assert len(rows) + skipped == sum(each.rows for each in appended)
