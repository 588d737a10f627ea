"""Device memory in segments that grow and shrink in place: plans and batches of other sizes do not fragment it."""

import os
from functools import cache
from typing import Any

import torch

from varuna.engine.device.faults import kind_of
from varuna.process.console import say

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_set: Any = torch._C._accelerator_setAllocatorSettings
_stream: Any = torch.cuda.Stream
_settings: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
"""Function that returns the script's settings; up to torch 2.12 nobody says."""


@cache
def let_segments_grow(device: torch.device) -> None:
    """Have torch use expandable segments, where the driver has them and the user has made no settings.

    Not when a process begins: this is its first call of CUDA, after which no process should be forked.
    """
    if any(os.environ.get(name) for name in _VARIABLES) or _settings():
        return
    _set("expandable_segments:True")
    try:
        with torch.cuda.stream(_stream(device, priority=-1)):  # which nobody has used: no memory of it is cached
            torch.empty(1, device=device)
    except RuntimeError as error:  # as on WSL, and with old drivers
        _set("expandable_segments:False")
        if kind_of(error) is not None:
            raise
        say(f"the memory of {device} may fragment, as its driver has no expandable segments")
