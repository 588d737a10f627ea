"""GPUs as NVIDIA's driver describes them, and devices on the bus that no driver speaks for."""

import os
import shutil
import subprocess
from pathlib import Path

from varuna.extras.doctor.judging.facts import GpuFacts

_FIELDS = ("name", "memory.total", "memory.used", "driver_version", "compute_mode")
_BOUND_S = 12.0
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MIB = 1 << 20


def look_at_gpus(root: Path = Path("/")) -> tuple[tuple[GpuFacts, ...], str]:
    """GPUs, and why there are none although the machine has one; ``root`` is where /sys is."""
    on_bus = _on_bus(root / "sys" / "bus" / "pci" / "devices")
    there = f"{on_bus} of NVIDIA's GPUs on the bus, but " if on_bus else ""
    if shutil.which("nvidia-smi") is None:
        return (), f"{there}no driver: there is no nvidia-smi" if there else ""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not answer within {_BOUND_S:.0f} s"
    except OSError as error:
        return (), f"nvidia-smi cannot be started: {error.strerror}"
    if told.returncode != 0:
        said = (told.stdout or told.stderr).strip().splitlines()
        return (), f"nvidia-smi says: {said[0] if said else f'exit code {told.returncode}'}"
    return parse_gpus(told.stdout), ""


def parse_gpus(table: str) -> tuple[GpuFacts, ...]:
    """``NVIDIA H100, 81559, 512, 550.54.15, Default`` and so on, with ``[N/A]`` where there is no figure."""
    found = []
    for line in table.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(_FIELDS):
            name, total, used, driver, mode = words
            found.append(
                GpuFacts(
                    name=name,
                    memory_bytes=int(total) * _MIB if total.isdigit() else 0,
                    used_bytes=int(used) * _MIB if used.isdigit() else 0,
                    driver=driver,
                    compute_mode=mode,
                )
            )
    return tuple(found)


def visible_gpus() -> str | None:
    """Return the GPUs that the environment leaves to processes of CUDA; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _on_bus(devices: Path) -> int:
    count = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return count
