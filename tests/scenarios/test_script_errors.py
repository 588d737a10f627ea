"""A script alone prints its own error when it ends with an exception."""

import sys
from pathlib import Path

import pytest

from tests.scenarios.launch import run

SCRIPT = """
import varuna

def begin():
    varuna.Trainer(model=None, dataset=[], optimizer=None, global_batch={})

begin()
"""


@pytest.mark.usefixtures("cold_start")  # the lines are all that there are
def test_an_error_of_varuna_ends_a_script_with_its_message_and_the_lines_of_the_script(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT.format(-1))
    done = run([sys.executable, str(script)])
    message, *places = done.err.splitlines()
    assert done.code == 1
    assert message.startswith("varuna: global_batch=-1")
    assert [place.partition(": ")[0].strip() for place in places] == [f"{script}:7", f"{script}:5"]


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT.format("1 / 0"))
    done = run([sys.executable, str(script)])
    assert done.err.startswith("Traceback")
    assert done.err.endswith("ZeroDivisionError: division by zero\n")
