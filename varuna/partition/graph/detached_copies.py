"""Copies that torch makes of a new tensor, or not, by who else holds it: in a graph they are that tensor.

What ``torch.arange`` and other functions without tensor arguments return has been moved out of the tensor that the
operation made, if nothing else holds it; else it is a detached copy, which export does not see made and would take for
a constant. A profiler, a debugger or a thread that looks where others are (``sys._current_frames``) holds it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_COPIES = torch.ops.aten.detach.default


def follow_copy(func: Any, args: tuple[Any, ...], made: Any) -> None:
    """Let export take such a copy, which an operation on fake tensors has made, for its original."""
    if func is not _COPIES or not isinstance(made, Tensor) or (mode := get_proxy_mode()) is None:
        return  # no mode: export itself runs the operation, which it will note
    if args[0].requires_grad:  # ``x.data``: no copy of something new, and it ends gradients, which ``x`` does not
        return
    tracked: Any = mode.tracer.tensor_tracker
    if args[0] in tracked and made not in tracked:
        tracked[made] = tracked[args[0]]
