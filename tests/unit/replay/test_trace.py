from pathlib import Path

import pytest

from varuna.core.errors import UsageError
from varuna.replay.trace import Change, read_trace


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
    ("text", "message"),
    [
        ("", "has no lines"),
        ("0,add,a\nyesterday,remove,a\n", "line 2 .* has no time"),
        ("0,burn,a\n", "line 1 .* is '0, burn, a'"),
        ("0,add,a\n1,remove,b\n", "removes b, which is not there"),
        ("0,add,a\n1,add,a\n", "adds a twice"),
        ("5,1\n1,2\n", "must ascend"),
        ("0,-3\n", "line 1"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(trace(tmp_path, text))


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the trace"):
        read_trace(tmp_path / "no.csv")
