"""Runs over a CUDA that has no GPU, as a user would start them."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.other_torch import NEWEST, environment, is_prepared

FAULT_JOB = str(Path(__file__).with_name("fault_job.py"))
UUIDS = ("01020304-0506-0708-090a-0b0c0d0e0f10", "11121314-1516-1718-191a-1b1c1d1e1f20")
"""Of the first GPUs."""
_BOUND_S = 110

needs_null_gpu = pytest.mark.skipif(
    not is_prepared(NEWEST), reason=f"python -m tests.other_torch {NEWEST} --prepare makes the GPU that is none"
)


@dataclass(frozen=True)
class Ran:
    """The end of a command, and all that it printed."""

    code: int
    text: str
    took_s: float

    @property
    def steps(self) -> int:
        """Number of steps that the run has done."""
        found = re.search(r"^(?:done|ended) +(\d+) steps?", self.text, re.MULTILINE)
        return int(found[1]) if found else 0

    def counted(self, what: str) -> int:
        """Return a number of the last line that has it, such as that of steps that were redone; 0 if none has."""
        found = re.findall(rf"(\d+) {what}", self.text)
        return int(found[-1]) if found else 0


def run(folder: Path, *options: str, fault: str = "", gpus: int = 3, **more: str) -> Ran:
    """``varuna run`` a job that is ready for faults."""
    words = ("-m", "varuna", "run", "--workers", str(gpus), "--run-dir", str(folder / "run"), *options, FAULT_JOB)
    return _ended(words, fault, gpus, more)


def plain(fault: str) -> Ran:
    """The same job in one process, without a manager."""
    return _ended((FAULT_JOB,), fault, 1, {})


def _ended(words: tuple[str, ...], fault: str, gpus: int, more: dict[str, str]) -> Ran:
    kept = {name: value for name, value in environment(NEWEST).items() if not name.startswith("VARUNA_")}
    own = {"NULL_GPUS": str(gpus), "NULL_GPU_FAULT": fault, "OMP_NUM_THREADS": "1", "VARUNA_CALIBRATION": "none"}
    chosen = {name: value for name, value in own.items() if value}
    begin_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words],
        env={**kept, **chosen, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_BOUND_S,
        check=False,
        cwd=os.fspath(Path(__file__).parents[2]),
    )
    return Ran(done.returncode, done.stdout, time.monotonic() - begin_s)
