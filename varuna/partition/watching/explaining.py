"""Reasons for which a model cannot be built or captured, in words of the user's own code."""

import contextlib
import re
import sys
import traceback
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from varuna.core.units import format_bytes
from varuna.partition.watching.own_code import OWN

_SKIPPED = (*OWN, contextlib.__file__, "<")

_WAYS_OUT = (
    "Two ways out: replace the branch by tensor operations (torch.where) or switch that feature off "
    "in the model's configuration; or wrap the code into one operator with torch.library.custom_op. cut=[...] does "
    "not help: it names cuts of a model that can be captured. See docs/partitioning.md, section Refusals."
)
_DATA_DEPENDENT = (
    "Varuna captures forward() once. It follows branches on samples and activations as the first samples take "
    "them. It cannot follow decisions by random numbers (such as LayerDrop) or by Python numbers made of "
    f"floating-point tensors (.item(), float()), nor, above 1 GiB of parameters, by activations. {_WAYS_OUT}"
)
_TOO_LARGE = (
    "If what decides is an activation: the model's parameters are {size}, and to see which way it goes the model would "
    "have to be built here, which is done below 1 GiB. Move the decision into a small module of its own that takes and "
    "returns tensors, and it runs as written; or write it with torch.where."
)
_SCRIPTED = (
    "{path} is a TorchScript module (torch.jit.script or trace) that holds parameters, which no graph of tensors with "
    "shapes alone can be made of. Give the model the module as it was before torch.jit.script; to compile it, pass "
    "compile=True to Trainer."
)
_COND = (
    "torch.cond, or another control flow operator, calls functions there that torch cannot capture, such as those that "
    "use modules from outside. Compute both branches and choose with torch.where(condition, one, other); or move the "
    "decision into a small module of its own that takes and returns tensors, with a Python if: it runs as written."
)
_UNREGISTERED = (
    "the model cannot be captured: {path} is a {kind} of modules, whose parameters PyTorch does not see: no optimizer "
    "trains them, no state_dict saves them, and they have no values in capture. Use torch.nn.ModuleList (or "
    "ModuleDict), and they train; with requires_grad_(False) on them as well, they stay as they begin."
)
BUILDING = (
    "Varuna calls model= first in a mode in which tensors have shapes but no data, then for real, on the CPU. It "
    "must build the same module each time and must not choose a device: no .cuda(), no .to(device). Does model() "
    "work in plain PyTorch?"
)
_UNKNOWN_IN_CONSTRUCTOR = (
    "the constructor decides there by the values of a tensor. Varuna calls model= first without data: it then knows "
    "small values that follow from the code alone, but not random ones, those of a tensor that was never filled, or a "
    "checkpoint's. Decide by the configuration or by a Python number, or do it in forward()."
)
_ANY_OTHER = (
    "Varuna builds the model and calls forward(), loss= and metrics= once on tensors that have shapes but no data, of "
    "three samples. Try the same call in plain PyTorch, in training mode, on a collated batch of three samples. If it "
    "works there, move what fails into a submodule that takes and returns tensors: it then runs as written. Or wrap it "
    "into one operator with torch.library.custom_op; see docs/partitioning.md, section Refusals. If it needs more "
    "samples, such as the k largest losses of a batch, it is no mean over samples: pass micro_batch= and "
    "loss=varuna.Loss(fn, per_micro_batch=True), as with gradient accumulation."
)
ASKS_FOR_DATA = (GuardOnDataDependentSymNode, DataDependentOutputException)
_PLAIN = (NameError, AttributeError, TypeError, LookupError, ImportError)


class Outside(NamedTuple):
    """A tensor that requires a gradient, and is no part of the model."""

    is_leaf: bool
    shape: tuple[int, ...]
    where: str | None
    """the user's line that computes with it"""


@dataclass
class ForwardFindings:
    """Findings about ``forward``, each with a line of the user's code; None where it did no such thing."""

    data_at: str | None = None
    """took a parameter's ``.data``"""
    fixed_at: str | None = None
    """made a Python number of the number of samples"""
    outside: dict[int, Outside] = field(default_factory=dict)
    """computed with, though they are no part of the model, by the address of their memory"""


class NotExportedError(Exception):
    """No way led to a graph; the cause is the error of the last one."""

    def __init__(self, noticed: ForwardFindings) -> None:
        super().__init__("the model cannot be exported")
        self.noticed = noticed


def explain(what: str, error: BaseException, remedy: str = _ANY_OTHER, noticed: ForwardFindings | None = None) -> str:
    """The message for ``error``: what cannot be done, where, why, and what to do."""
    where = user_frame(error)
    place = f" at {where}" if where else ""
    if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
        return f"the model {what}: {one_number(noticed or ForwardFindings())}"
    if remedy is BUILDING and isinstance(error, (*ASKS_FOR_DATA, DynamicOutputShapeException)):
        return f"the model {what}{place}: {_UNKNOWN_IN_CONSTRUCTOR}"
    if isinstance(error, ASKS_FOR_DATA):
        return f"the model {what}{place}: a decision there follows from data.\n{_DATA_DEPENDENT}"
    if isinstance(error, DynamicOutputShapeException):
        return f"the model {what}{place}: the size of a tensor there follows from data.\n{_DATA_DEPENDENT}"
    if "numpy() is not supported" in str(error):
        return f"the model {what}{place}: values leave the graph for NumPy there.\n{_DATA_DEPENDENT}"
    if type(error).__name__ == "UncapturedHigherOrderOpError":
        return f"the model {what}{place}: {_COND}"
    first_line = in_plain_words((str(error).strip() or type(error).__name__).splitlines()[0])
    if remedy is _ANY_OTHER and isinstance(error, _PLAIN) and _is_raised_by_user(error):
        function = traceback.extract_tb(error.__traceback__)[-1].name
        return f"{function}() fails{place}: {type(error).__name__}: {first_line}"
    return f"the model {what}{place}: {type(error).__name__}: {first_line}\n{remedy}"


def of_model(said: str, model: nn.Module, error: BaseException, *, is_small: bool) -> str:
    """The message of ``explain`` with details of this model.

    Args:
        said: of ``error``.
        model: without data.
        error: that ended the capture.
        is_small: its branches on activations could be followed.
    """
    for path, each in model.named_modules():
        if isinstance(each, torch.jit.ScriptModule) and any(True for _ in each.parameters()):
            return f"the model cannot be captured: {_SCRIPTED.format(path=path or type(each).__name__)}"
    if "meta" in str(error) and (unseen := _unregistered(model)) is not None:
        return _UNREGISTERED.format(path=unseen[0], kind=unseen[1])
    if not is_small and isinstance(error, ASKS_FOR_DATA):
        size = format_bytes(sum(4 * value.numel() for value in model.parameters()))
        return f"{said}\n{_TOO_LARGE.format(size=size)}"
    return said


def _unregistered(model: nn.Module) -> tuple[str, str] | None:
    """The first plain container of modules with parameters that are not the model's: its path and kind."""
    own = {id(each) for each in model.modules()}
    for path, each in model.named_modules():
        for name, value in vars(each).items():
            parts = list(value.values()) if isinstance(value, dict) else value
            if name == "_modules" or not isinstance(parts, list | tuple):
                continue
            modules = [part for part in parts if isinstance(part, nn.Module) and id(part) not in own]
            if any(True for part in modules for _ in part.parameters()):
                return f"{path}.{name}".strip("."), type(value).__name__
    return None


def one_number(noticed: ForwardFindings) -> str:
    """Say why a model takes one number of samples only, and what to do."""
    place = f", at {noticed.fixed_at}" if noticed.fixed_at else ""
    return (
        "forward() works for one number of samples only, because it turns that number into a Python "
        f"number{place}: int(x.shape[0]), [0] * len(x), x.tolist(), int(batch.max()) + 1 and most loops over the "
        "samples (for one in x) do this; x.shape[0] and len(x) do not (global_mean_pool(x, batch, size=y.shape[0])). "
        "Micro-batches may be short: write it for any number of samples, with operations on the whole batch."
    )


def without_value(name: str, line: str | None, noticed: ForwardFindings) -> str:
    """Say why a tensor that the graph needs has no value, and what to do.

    Args:
        name: as export calls it.
        line: of the user's code that uses it, if known.
        noticed: what forward() did.
    """
    attribute = name.removeprefix("model.")
    if not re.fullmatch(r"(.*\.)?lifted_tensor_\d+", attribute):
        return (
            f"the tensor attribute {attribute} of the model has no value fixed by the constructor: it is random, "
            "or was never filled. Register it as a buffer (register_buffer), which belongs to the model's state."
        )
    if noticed.data_at:
        return (
            f"forward() takes .data of a parameter at {noticed.data_at}, which autograd does not see: a write to "
            "it would be lost. Clamp what is computed from the parameter (scale.clamp(max=4.6)) instead of its data, "
            "or change the parameter in Trainer(after_step=...), which runs once per step. For a layer that takes its "
            "first values from the first batch (ActNorm): build the model, let it run once on samples (with "
            "torch.no_grad(): model(**batch)), and pass it built: Trainer(model, ...)."
        )
    place = f" at {line}" if line else ""
    return (
        f"forward() uses a tensor{place} that comes from neither the samples nor the model, and has no value "
        "during capture. Create it in the constructor and register it as a buffer."
    )


def in_plain_words(text: str) -> str:
    """A message of torch without the names that export gives to numbers."""
    text = re.sub(r"\bs\d+\b", "batch", text)
    text = re.sub(r"\bz?uf?\d+\b", "a number from data", text)
    return text.replace("FakeTensor", "Tensor")


def _is_raised_by_user(error: BaseException) -> bool:
    """Return whether the last line that ran is the user's, and its error is not about tracing."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_users(frames[-1].filename) and not re.search(r"Sym(Int|Float|Bool)", str(error))


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


def line_of(node: Node) -> str | None:
    """``file:line`` of the deepest of the user's functions that made a node of a captured graph."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    return next((f"{file}:{line}" for file, line in reversed(frames) if _is_users(file)), None)


def _is_users(file: str) -> bool:
    return not file.startswith(_SKIPPED)
