"""The libraries of the field, imported once before anything is forked.

timm, torchvision and diffusers lie in a folder of their own, ``.field``, which ``make`` fills, and not beside Varuna:
torchvision's wheel holds code for one build of torch and fails to import beside any other, and transformers imports it
wherever it finds it. Here the few operations that it declares in C++ (``nms`` and the like, for detection) are declared
instead if they are missing; all its models of images and videos are plain Python.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / ".field"
_kept: list[Any] = []


def load() -> None:
    """Import what every job needs, and what of the rest there is."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    # If a process's first backward is of fake tensors, as at capture, a build for CUDA starts threads for GPUs though
    # there are none, and no process that is forked then can run a backward.
    torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
    logging.getLogger("torch").setLevel(logging.ERROR)
    if has_all():
        sys.path.append(str(FOLDER))
        _import_torchvision()
    import transformers

    logs: Any = transformers.logging
    logs.set_verbosity_error()
    from transformers.models.auto import configuration_auto, modeling_auto  # noqa: F401


def has_all() -> bool:
    """Whether ``make`` has filled the folder."""
    return (FOLDER / ".installed").exists()


def _import_torchvision() -> None:
    import torch

    operations: Any = torch.ops
    kind: Any = torch.library.Library
    try:
        operations.load_library(next((FOLDER / "torchvision").glob("_C*.so")))
    except (OSError, StopIteration):
        declared = kind("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(declared)  # it lasts as long as this object
    import torchvision  # noqa: F401
