"""Why a model cannot be built or captured, in words of the user's own code."""

import contextlib
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch._dynamo.exc import UserError, UserErrorType

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)

_WAYS_OUT = (
    "Two ways out: replace the branch by tensor operations (torch.where, torch.cond) or switch that feature off in the "
    "model's configuration; or wrap what cannot be followed into one operator with torch.library.custom_op. cut_at= "
    "does not help: it names cuts of a model that can be captured. See docs/partitioning.md, section Refusals."
)
_DATA_DEPENDENT = (
    "Varuna captures forward() once: it follows branches on the samples, but no Python branch or loop that depends on "
    f"activations or random numbers (LayerDrop is one). {_WAYS_OUT}"
)
_ONE_NUMBER = (
    "forward() works for one number of samples only, since it makes a Python number of it: len(x) and int(x.shape[0]) "
    "do, x.shape[0] does not."
)
BUILDING = (
    "Varuna calls model= first in a mode in which tensors have shapes but no data, then for real, on the CPU. It must "
    "build the same module each time, and leave the device to Varuna: no .cuda(), no .to(device). Does model() work in "
    "plain PyTorch?"
)
_ANY_OTHER = (
    "Varuna builds the model and calls forward(), loss= and metrics= once on tensors that have shapes but no data. Try "
    "the same call in plain PyTorch, in training mode, on a collated batch of dataset samples. If it works there: "
    f"{_WAYS_OUT}"
)


def explain(what: str, error: Exception, remedy: str = "") -> str:
    """What to tell the user about ``error``: what the model cannot, where, why, and what to do."""
    where = user_frame(error)
    place = f" at {where}" if where else ""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
        return f"the model {what}: {_ONE_NUMBER} {_WAYS_OUT}"
    remedy = remedy or (_DATA_DEPENDENT if type(error).__module__.startswith("torch") else _ANY_OTHER)
    return f"the model {what}{place}: {type(error).__name__}: {first_line}\n{remedy}"


def user_frame(error: BaseException) -> str | None:
    """``file:line`` of the deepest frame outside torch and Varuna, which is where the user can act."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return next((f"{file}:{line}" for file, line in reversed(frames) if _is_users(file)), None)


def user_line() -> str | None:
    """``file:line`` of the deepest running frame outside torch and Varuna."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_users(file: str) -> bool:
    return not file.startswith((*_SKIPPED, "<"))
