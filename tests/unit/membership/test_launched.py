import subprocess
import sys
from pathlib import Path

from varuna.core.errors import DataError, UsageError
from varuna.membership.launched import explained

SCRIPT = """
import varuna

def begin():
    varuna.Trainer(model=None, dataset=[], optimizer=None, global_batch={})

begin()
"""


def test_an_error_of_varuna_ends_a_script_with_its_message_and_the_lines_of_the_script(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT.format(-1))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    message, *places = done.stderr.splitlines()
    assert done.returncode == 1
    assert message.startswith("varuna: global_batch=-1")
    assert [place.partition(": ")[0].strip() for place in places] == [f"{script}:7", f"{script}:5"]


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT.format("1 / 0"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_the_lines_of_the_cause_are_told_too() -> None:
    def raise_it() -> None:
        raise KeyError("gone")  # the line that matters

    try:
        try:
            raise_it()
        except KeyError as error:
            raise DataError("dataset[3] cannot be read") from error
    except DataError as error:
        told = explained(error)
    assert told.startswith("varuna: dataset[3] cannot be read\n")
    assert 'raise KeyError("gone")' in told.splitlines()[-1]
    assert explained(UsageError("no frames yet")) == "varuna: no frames yet"
