"""Calibrations that earlier runs have stored, by graph and hardware."""

import hashlib
import os
import re
from pathlib import Path

from varuna.calibration.file import check_matches, read_calibration, write_calibration
from varuna.calibration.format import Calibrations
from varuna.core.errors import UsageError
from varuna.core.model import JobFacts


def cache_file(job: JobFacts, device_class: str = "") -> Path:
    """Return the file of a job's calibration on this machine, under ``XDG_CACHE_HOME``, else ``~/.cache``.

    Workers whose devices are of a class have a file of their own.

    The name covers what decides on speed: graph and sections, precision, compiler, threads, the machine's processors.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    told = f"{job.model.digest} {job.precision} {job.compiled} {job.threads} {machine_name()} {device_class}".rstrip()
    return home / "varuna" / "calibrations" / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"


def remembered(job: JobFacts, path: Path, device_class: str = "") -> Calibrations | None:
    """The calibration of a class of devices that an earlier run stored; None if there is none that can be used."""
    try:
        known = read_calibration(path)
        check_matches(known, job.model)
    except UsageError:
        return None
    found = next((name for name in (device_class, "") if name in known.classes), None)
    return None if found is None else known.only(found)


def remember(calibrations: Calibrations, path: Path) -> None:
    """Replace the file as a whole; if the folder cannot be written, do nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        write_calibration(calibrations, fresh)
        fresh.replace(path)
    except OSError:
        return


def machine_name() -> str:
    """GPUs of this machine as the driver names them, else its CPU and how many cores it has."""
    gpus = [_field(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    found = [name for name in gpus if name]
    if found:
        return ", ".join(found)
    return f"{_field(Path('/proc/cpuinfo'), 'model name') or 'CPU'} x {os.cpu_count()}"


def _field(path: Path, name: str) -> str:
    try:
        text = path.read_text()
    except OSError:
        return ""
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
