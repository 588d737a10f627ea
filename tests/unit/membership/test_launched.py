import subprocess
import sys

import pytest

from tests.depth import nightly_rows
from varuna.core.errors import DataError, UsageError
from varuna.membership.launched import explained


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


RAISES = """
from unittest.mock import Mock

import torch

from varuna.core.errors import DeviceError
from varuna.membership import launched

told = Mock()
told.failed = lambda summary, text, code, fault: print(code, fault, flush=True)
launched.manager = lambda: {told}
launched.watch_exceptions()
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            'torch.AcceleratorError("CUDA error: unspecified launch failure")',
            "error='CUDA error: unspecified launch fail",
        ),
        ('ValueError("CUDA error: said by the user")', "1 None"),
        *nightly_rows(
            ('torch.OutOfMemoryError("CUDA out of memory")', "is_memory=True"),
            ('DeviceError("rank 0 waited 300 s")', "error='it hangs'"),
        ),
    ],
)
def test_an_exception_that_ends_the_script_tells_the_manager_of_a_fault_of_the_device(error: str, said: str) -> None:
    program = RAISES.format(error=error, told="told")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stdout
    assert "Traceback" in done.stderr
    assert "Xid" not in done.stderr  # the manager says what becomes of it


def test_without_a_manager_a_fault_of_the_device_is_explained() -> None:
    program = RAISES.format(error='torch.AcceleratorError("CUDA error: unspecified launch failure")', told="None")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Look for Xid" in done.stderr
