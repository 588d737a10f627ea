"""The number of workers that suit this machine: one per GPU, counted without loading torch."""

import os
import shutil
import subprocess

from varuna.process.console import warn


def default_workers(least: int = 1) -> int:
    """Return one per GPU, and ``least`` where there are fewer."""
    return max(least, count_gpus())


def count_gpus() -> int:
    """Count the GPUs that workers may use, without loading torch: CUDA_VISIBLE_DEVICES, else what the driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        warn(f"cannot count GPUs ({error}); give --workers")
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
