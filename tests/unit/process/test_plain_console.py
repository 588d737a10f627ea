import io

import pytest
from rich.table import Table
from rich.text import Text

from varuna.process.console import say
from varuna.process.plain_console import PlainConsole

HOSTILE = "[/x] x[i] :bomb: \x1b]0;mine\x1b\\\x1b]52;c;AAAA\x1b\\\x1b[2J\x9b2K\x1bc\x07\rend"
AS_TEXT = "[/x] x[i] :bomb: cend"


@pytest.mark.parametrize("made", [str, Text])
def test_what_others_said_is_shown_and_not_obeyed(made: type[str] | type[Text]) -> None:
    file = io.StringIO()
    table = Table(title=HOSTILE, box=None)
    table.add_column(HOSTILE, no_wrap=True)
    table.add_row(made(HOSTILE))
    PlainConsole(file=file, width=80).print(table, made(HOSTILE))
    assert file.getvalue().count(AS_TEXT) == 4
    assert file.getvalue().replace("\n", "").isprintable()


def test_our_own_styles_reach_a_terminal() -> None:
    file = io.StringIO()
    PlainConsole(file=file, force_terminal=True, color_system="standard").print(Text("fault", style="red"))
    assert file.getvalue() == "\x1b[31mfault\x1b[0m\n"


def test_a_line_of_ours_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"w3: {HOSTILE}\n\tand more")
    assert capsys.readouterr().err == f"varuna: w3: {AS_TEXT}\n\tand more\n"
