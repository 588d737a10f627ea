"""A rank that ends itself is a loss to its manager, and not a script that failed."""

import subprocess
import sys

import pytest

from tests.depth import nightly_rows

PROGRAM = """
from unittest.mock import Mock
from varuna.core.devices import DeviceFacts
from varuna.engine.worker.heartbeat import Heartbeat

membership = Mock(survives={survives})
membership.failed = lambda summary, traceback, code, fault=None: print(fault, flush=True)
heartbeat = Heartbeat(Mock(), None, Mock(), membership)
{how}
"""
HANGS = 'heartbeat.hangs(DeviceFacts(name="0102", memory_bytes=1), "rank 0 (stage 0): GPU 0102 hangs.")'


GIVES_UP = 'heartbeat.give_up("ends itself.")'


@pytest.mark.parametrize(
    ("how", "survives", "code"),
    [(HANGS, True, -9), *nightly_rows((GIVES_UP, True, -9), (GIVES_UP, False, 1), (HANGS, False, 1))],
)
def test_it_ends_as_if_killed_if_a_manager_makes_good_for_it(how: str, survives: bool, code: int) -> None:
    program = PROGRAM.format(survives=survives, how=how)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "heartbeat" in done.stderr  # where it was
    assert ("device='0102'" in done.stdout) == (how == HANGS)
