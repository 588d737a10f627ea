from pathlib import Path

import pytest

from varuna.core.errors import UsageError
from varuna.extras.replay.recording import TimeUnit, read_trace
from varuna.extras.replay.trace import Change


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_events_in_milliseconds(tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path, "1000,add,a\n1000,add,b\n5000,remove,a\n9000,add,a\n"))
    assert found.changes == (Change(0, ("a", "b")), Change(4, (), ("a",)), Change(8, ("a",)))
    assert found.spans() == [(0, 4, 2), (4, 8, 1), (8, 8, 2)]
    assert (found.end_s, found.most_nodes) == (8, 2)


def test_numbers_of_nodes_at_timestamps_in_two_columns(tmp_path: Path) -> None:
    text = "2021-12-11, 11:11:30, 3\n2021-12-11, 11:13:10, 3\n2021-12-11, 11:14:10, 1\n2021-12-12, 11:11:30, 2\n"
    found = read_trace(trace(tmp_path, text))
    assert found.changes[0] == Change(0, ("node0", "node1", "node2"))
    assert found.changes[1].at_s == 160
    assert len(found.changes[1].removed) == 2
    assert found.changes[2].added == ("node3",)
    assert found.end_s == 24 * 3600


def test_iso_timestamps_a_header_and_comments(tmp_path: Path) -> None:
    text = "time,nodes\n# measured by nobody\n2024-01-01T00:00:00+00:00,2\n2024-01-01T00:01:00+00:00,4\n"
    assert [c.at_s for c in read_trace(trace(tmp_path, text)).changes] == [0, 60]


def test_the_same_numbers_take_the_same_nodes(tmp_path: Path) -> None:
    path = trace(tmp_path, "0,9\n1000,4\n2000,8\n3000,1\n")
    assert read_trace(path) == read_trace(path)


@pytest.mark.parametrize(
    ("times", "unit", "between_s", "clock"),
    [
        (("0", "90000"), None, 90, "milliseconds"),
        (("0", "21529", "94321"), None, 94321, "seconds"),
        (("0.000", "5.980", "26.2"), None, 26.2 * 3600, "hours"),
        (("1600000000", "1600003600"), None, 3600, "seconds since 1970"),
        (("1600000000123", "1600003600123"), None, 3600, "milliseconds since 1970"),
        (("1600000000000123", "1600003600000123"), None, 3600, "microseconds since 1970"),
        (("0", "90000"), "s", 90000, "seconds"),
        (("0", "90"), "min", 5400, "minutes"),
    ],
)
def test_the_unit_of_the_clock_is_found_or_given(
    tmp_path: Path, times: tuple[str, ...], unit: TimeUnit | None, between_s: float, clock: str
) -> None:
    found = read_trace(trace(tmp_path, "".join(f"{at},{i + 1}\n" for i, at in enumerate(times))), unit)
    assert found.end_s == pytest.approx(between_s)
    assert found.clock == clock


@pytest.mark.parametrize(
    ("lines", "change"),
    [
        ("9000,remove,a\n9000,add,a\n", Change(9, ("a",), ("a",))),
        ("9000,add,a\n9000,remove,a\n", Change(9, ("a",), ("a",))),
        ("9000,add,b\n9000,remove,b\n9000,add,c\n", Change(9, ("c",))),
        ("9000,remove,b\n9000,Add,b\n9000,add,c\n", Change(9, ("c",))),
    ],
)
def test_lines_of_one_instant_may_stand_in_any_order(tmp_path: Path, lines: str, change: Change) -> None:
    assert read_trace(trace(tmp_path, "0,add,a\n" + lines)).changes == (Change(0, ("a",)), change)


def test_of_several_numbers_at_one_instant_the_last_counts(tmp_path: Path) -> None:
    """Recordings that are made to be drawn as steps have two lines for each change."""
    found = read_trace(trace(tmp_path, "0,0\n21529,0\n21529,4\n21556,4\n21556,12\n94321,12\n"))
    assert [nodes for _, _, nodes in found.spans()] == [0, 4, 12]


def test_numbers_at_equal_intervals_in_json(tmp_path: Path) -> None:
    path = trace(tmp_path, '{"metadata": {"gap_seconds": 300}, "data": [0, 3, 3, 1]}')
    found = read_trace(path)
    assert found.spans() == [(0, 300, 0), (300, 900, 3), (900, 1200, 1)]
    assert found.clock == "a number of nodes every 300 s"


def test_tabs_semicolons_and_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_trace(trace(tmp_path, "\ufefftime;nodes\n0;2\n60000;3.0\n")).most_nodes == 3
    assert read_trace(trace(tmp_path, "0\tadd\ta\n60000\tadd\tb\n")).most_nodes == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lines"),
        ("time,nodes\n", "has no lines"),
        ("0,add,a\nyesterday,remove,a\n", "line 2 has no time"),
        ("0,1\nnan,2\n", "line 2 has no time"),
        ("0,burn,a\n", "line 1 says 'burn, a'"),
        ("0,add,a\n1,remove,b\n", "removes b, which is not there"),
        ("0,add,a\n1,add,a\n", "adds a twice"),
        ("5,1\n1,2\n", "line 2 is earlier"),
        ("0,-3\n", "line 1"),
        ('{"data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds"),
        ('{"metadata": {"gap_seconds": 5}, "data": [-1]}', "0 or more"),
        ("[1, 2", "not a recording"),
        ("[" * 10**5, "not a recording"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(trace(tmp_path, text))


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the trace"):
        read_trace(tmp_path / "no.csv")
