"""Starts measuring workers on this machine and collects their samples."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from varuna.calibration.samples import Measured
from varuna.core import errors
from varuna.core.errors import VarunaError, WorkerError
from varuna.process.worker_environment import DEFAULTS

_BOUND_S = 1800.0
_POLL_S = 0.05
_TAIL = 2000
PHASE = ".phase"
"""Suffix of the file in which a worker says what it does now."""
FAILED = ".failed"
"""Suffix of the file in which a worker says what went wrong."""


def collect(
    script: Path,
    args: Sequence[str],
    *,
    workers: int,
    store: tuple[str, int],
    on_phase: Callable[[str], None] = lambda phase: None,
) -> list[Measured]:
    """Measure with ``workers`` processes at once; if one fails, all end.

    Args:
        script: the training script.
        args: its arguments.
        workers: processes to start.
        store: host and port of a store that this process keeps.
        on_phase: hears what the first worker does next.

    Raises:
        VarunaError: a worker raised it.
        WorkerError: a worker died, or half an hour has passed.
    """
    with tempfile.TemporaryDirectory(prefix="varuna-calibrate-") as folder:
        outputs = [Path(folder) / f"{rank}.json" for rank in range(workers)]
        logs = [output.with_suffix(".log") for output in outputs]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, (output, log) in enumerate(zip(outputs, logs, strict=True)):
                processes.append(_start([str(output), str(script), *args], rank, workers, store, log))
            _await(processes, outputs, logs, on_phase)
        finally:
            for process in processes:
                _kill(process)
        return [Measured.model_validate_json(output.read_bytes()) for output in outputs]


def _start(
    arguments: Sequence[str], rank: int, workers: int, store: tuple[str, int], log: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **DEFAULTS,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "varuna.measure", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await(
    processes: Sequence[subprocess.Popen[bytes]],
    outputs: Sequence[Path],
    logs: Sequence[Path],
    on_phase: Callable[[str], None],
) -> None:
    deadline_s, told = time.monotonic() + _BOUND_S, ""
    while True:
        with contextlib.suppress(OSError):
            if (phase := outputs[0].with_suffix(PHASE).read_text()) != told:
                on_phase(told := phase)
        codes = [process.poll() for process in processes]
        written = [output.exists() for output in outputs]
        for rank, code in enumerate(codes):
            if code is not None and not written[rank]:
                raise _failure(rank, code, outputs[rank], logs[rank])
        if all(written):
            return
        if time.monotonic() > deadline_s:
            busy = [rank for rank, done in enumerate(written) if not done]
            raise WorkerError(
                f"workers {busy} were still measuring after {_BOUND_S / 60:.0f} minutes. Calibrate with a smaller "
                "global batch, or check whether the script waits for something."
            )
        time.sleep(_POLL_S)


def _failure(rank: int, code: int, output: Path, log: Path) -> VarunaError:
    """The error that the worker wrote down, else one with the end of its output."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(output.with_suffix(FAILED).read_text())
        kind: type[VarunaError] = getattr(errors, told["kind"], WorkerError)
        return kind(told["error"])
    tail = log.read_text(errors="replace")[-_TAIL:].strip()
    died = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return WorkerError(f"measuring worker {rank} {died}:\n{tail}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
