import io
import sys

import pytest
from rich.console import Console, Group

from varuna.observe.terminal import Progress, beside_a_script
from varuna.process.console import say


def terminal(file: io.StringIO) -> Console:
    return Console(file=file, force_terminal=True, no_color=True, width=23)


def test_without_a_terminal_progress_lines_are_rare() -> None:
    file, now_s = io.StringIO(), [0.0]
    with Progress(Console(file=file), every_s=5.0, clock=lambda: now_s[0]) as progress:
        for second in range(12):
            now_s[0] = float(second)
            progress.show(f"line {second}")
        progress.show("last", final=True)
    assert file.getvalue().split("\n") == ["line 0", "line 5", "line 10", "last", ""]


def test_permanent_lines_are_never_wrapped() -> None:
    file = io.StringIO()
    Progress(Console(file=file, width=20), live_line=False).print_line("x" * 90)
    assert file.getvalue() == "x" * 90 + "\n"


def test_only_permanent_lines_are_written_beside_a_script() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), live_line=False) as progress:
        progress.show("progress", final=True)
        progress.print_line("morph")
    assert file.getvalue() == "morph\n"


def test_on_a_terminal_the_line_is_away_while_others_write() -> None:
    file = io.StringIO()

    def say(data: bytes) -> None:
        file.write(data.decode())

    with Progress(terminal(file), clock=lambda: 0.0) as progress:
        progress.show("step 1", final=True)
        progress.write(b"said", say)
        progress.show("step 2", final=True)  # the script has not ended its line
        progress.write(b" more\n", say)
        progress.refresh()
        progress.show("a line of more than twenty columns", final=True)
        progress.print_line("kept")
    clear = "\r\x1b[J"
    drawn = f"{clear}step 1{clear}said more\n{clear}step 2{clear}a line of more than {clear}kept\n{clear}"
    assert file.getvalue() == drawn


def test_lines_go_above_a_picture_which_comes_back_at_once() -> None:
    file, now_s = io.StringIO(), [0.0]
    with Progress(terminal(file), clock=lambda: now_s[0]) as progress:
        progress.show(Group("one", "two", "three"), final=True)
        now_s[0] += 1.0
        progress.write(b"said\n", lambda data: None)
        say("from somewhere in this process")
    progress.show("after the end", final=True)
    up = "\x1b[2A\r\x1b[J"
    drawn = "one\ntwo\nthree"
    assert file.getvalue() == f"\r\x1b[J{drawn}{up}\r\x1b[J{drawn}{up}varuna: from somewhere in this process\n\r\x1b[J"


def test_a_picture_that_a_narrower_terminal_has_broken_is_removed_whole() -> None:
    file, console = io.StringIO(), terminal(io.StringIO())
    console.file = file
    with Progress(console, clock=lambda: 0.0) as progress:
        progress.show(Group("x" * 20, "y"), final=True)
        console.width = 9
        progress.print_line("kept")
    assert "\x1b[3A\r\x1b[Jkept" in file.getvalue()  # three rows of x, one of y


def test_a_log_gets_no_carriage_return(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    progress, write = beside_a_script()
    with progress:
        progress.show("step 1")
        write(b"said\n")
        progress.refresh()
        progress.show("step 9", final=True)
    sys.stdout.flush()
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"said\n", b"step 1\nstep 9\n")
