"""The device of this worker: its name, its class, and how many of its bytes a calibration may use."""

import os
import zlib
from pathlib import Path

import torch

from varuna.core.devices import others_bytes

CLASS_VARIABLE = "VARUNA_DEVICE_CLASS"
_LONGEST_NAME = 255  # that the manager takes

_SHARE = 0.8  # of what is free: allocators and messages want some


def hardware_name(device: torch.device) -> str:
    """Name the device; a CPU with the threads of a worker, since both decide on speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' * (threads > 1)} a worker"


def device_class(device: torch.device) -> str:
    """Return the user's name for this worker's device class, else the GPU's; empty for CPUs, which are all alike."""
    told = os.environ.get(CLASS_VARIABLE, "").strip()
    return told[:_LONGEST_NAME] or (torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def rounding_kind(device: torch.device) -> int:
    """Return a number for what decides on rounding: the GPU, and the host's processor, which draws first values."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return zlib.crc32(f"{gpu}, {_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}".encode())


def device_bytes(device: torch.device, workers: int) -> int | None:
    """Return the bytes of a GPU, or a worker's part of it; None for a CPU, whose memory its workers share."""
    if device.type != "cuda":
        return None
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return total_bytes // sharers(workers, torch.cuda.device_count())


def sharers(workers: int, gpus: int) -> int:
    """Return the most workers of a machine that share one GPU: workers are dealt out in turn."""
    return -(-workers // gpus)


def usable_bytes(device: torch.device, workers: int) -> int | None:
    """Return most of the free bytes, shared equally by the ``workers`` of this machine; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _SHARE / sharers(workers, torch.cuda.device_count()))
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(int(rows["MemAvailable"].split()[0]) * 1024 * _SHARE / workers)
    except (OSError, KeyError, ValueError):
        return None


def held_by_others(device: torch.device | int) -> int:
    """Return the bytes of a GPU that other processes hold now."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return others_bytes(total_bytes, free_bytes, torch.cuda.memory_reserved(device))


def _cpu_name() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((row.split(":", 1)[1].strip() for row in rows if row.startswith("model name")), "CPU")
