"""Varuna trains massive PyTorch models on whatever GPUs you can get."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from varuna.core.errors import (
    CheckpointError,
    DataError,
    FleetError,
    LinkError,
    ModelError,
    NoPlanError,
    UsageError,
    VarunaError,
    WorkerError,
)
from varuna.core.plan import Plan
from varuna.core.version import __version__

if TYPE_CHECKING:
    from varuna.engine.stage.cross_stage import all_reduce_shared, owned
    from varuna.results import Step
    from varuna.trainer import Trainer

__all__ = [
    "CheckpointError",
    "DataError",
    "FleetError",
    "LinkError",
    "ModelError",
    "NoPlanError",
    "Plan",
    "Step",
    "Trainer",
    "UsageError",
    "VarunaError",
    "WorkerError",
    "__version__",
    "all_reduce_shared",
    "owned",
]


def __getattr__(name: str) -> Any:
    """Load torch only for what needs it: planning and the command line run without."""
    if name == "Trainer":
        return _load_trainer()
    if name == "Step":
        return import_module("varuna.results").Step
    if name in ("all_reduce_shared", "owned"):
        return getattr(import_module("varuna.engine.stage.cross_stage"), name)
    raise AttributeError(f"module 'varuna' has no attribute {name!r}")


def _load_trainer() -> Any:
    """Load the Trainer without collecting garbage: torch.export brings thousands of modules, and it saves a quarter."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module("varuna.trainer").Trainer
    finally:
        if was_enabled:
            gc.enable()
