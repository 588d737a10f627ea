import subprocess
import sys

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
import os
from unittest.mock import Mock

import torch

from varuna.core.errors import DeviceError, OtherSampleError
from varuna.membership import launched

told = Mock()
told.failed = lambda summary, text, code, fault, accused: print(code, fault, accused, flush=True)
for manager, error in [{cases}]:
    if os.fork() == 0:
        launched.manager = lambda: manager
        launched.watch_exceptions()
        raise error
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""

CASES = {
    'told, torch.AcceleratorError("CUDA error: unspecified launch failure")': "error='CUDA error: unspecified",
    'told, ValueError("CUDA error: said by the user")': "1 None",
    'told, OtherSampleError("dataset[3] is not the same here", 2)': "1 None 2",
    'told, torch.OutOfMemoryError("CUDA out of memory")': "is_memory=True",
    'told, DeviceError("rank 0 waited 300 s")': "error='it hangs'",
    'None, torch.AcceleratorError("CUDA error: unspecified launch failure")': "Look for Xid",
}
"""By manager and exception: what is said."""


def test_an_exception_that_ends_the_script_tells_the_manager_of_a_fault_of_the_device_or_explains_it() -> None:
    program = RAISES.format(cases=", ".join(f"({case})" for case in CASES))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=True)
    *ends, rest = done.stdout.split("exit code 1\n")
    assert rest == ""
    for (case, said), output in zip(CASES.items(), ends, strict=True):
        assert said in output
        assert "Traceback" in output
        assert ("Xid" in output) == case.startswith("None"), "a manager says what becomes of it"
