"""Settings of a process that computes: threads, and on a CPU an allocator that keeps freed memory."""

import os

import torch

from varuna.process.allocator import keep_freed_memory


def configure_process(device: torch.device) -> None:
    """Make this process a worker that computes on ``device``; a calibration measures under the same settings."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if device.type == "cpu":
        keep_freed_memory()
