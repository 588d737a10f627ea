"""Lines have bounds, whatever a program writes, and no byte is lost on the way."""

import random

from hypothesis import given
from hypothesis import strategies as st

from varuna.fleet.workers.launcher import LINE_BYTES, TAIL_BYTES, Lines, Tail


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"x" * 3000])), st.randoms(use_true_random=False))
def test_what_goes_in_comes_out_in_lines_wherever_the_pipe_was_cut(parts: list[bytes], cuts: random.Random) -> None:
    stream, lines, found = b"".join(parts), Lines(), []
    at = 0
    while at < len(stream):
        step = cuts.randint(1, 5000)
        found += lines.feed(stream[at : at + step])
        at += step
    rest = lines.unfinished_line()
    assert b"".join(found) + rest == stream
    assert all(0 < len(line) <= LINE_BYTES for line in found)
    assert all(line.endswith((b"\n", b"\r")) or len(line) == LINE_BYTES for line in found)
    assert all(b"\r" not in line[:-2] and b"\n" not in line[:-1] for line in found)


def test_a_progress_bar_is_lines_too_and_an_end_of_two_bytes_is_one_end() -> None:
    lines = Lines()
    assert lines.feed(b"10%\r20%\r") == [b"10%\r"]  # what follows may belong to it
    assert lines.feed(b"\nend\r\nmore") == [b"20%\r\n", b"end\r\n"]
    assert lines.unfinished_line() == b"more"


def test_the_newest_lines_are_kept_within_bounds_of_number_and_of_bytes() -> None:
    tail = Tail()
    for number in range(1000):
        tail.add(b"%d\n" % number)
    assert tail.text().splitlines() == [str(number) for number in range(800, 1000)]
    for _ in range(100):
        tail.add(b"\xff" * LINE_BYTES)
    assert len(tail.text()) <= TAIL_BYTES
