"""Varuna trains PyTorch models that are too big or too slow for one GPU, on machines that come and go."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from varuna.core.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    FleetError,
    LinkError,
    ModelError,
    NoPlanError,
    UsageError,
    VarunaError,
    WorkerError,
)
from varuna.core.plan import Plan
from varuna.core.version import TORCH_RANGE, __version__, is_tested_torch

if TYPE_CHECKING:
    from varuna.core.model import Memory, Network
    from varuna.engine.stage.cross_stage import all_reduce_shared, owned
    from varuna.job.options import Checkpoints, Collate, Loss, Publish, Weights
    from varuna.results import Evaluation, Step
    from varuna.trainer import Trainer

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Collate",
    "DataError",
    "DivergedError",
    "Evaluation",
    "FleetError",
    "LinkError",
    "Loss",
    "Memory",
    "ModelError",
    "Network",
    "NoPlanError",
    "Plan",
    "Publish",
    "Step",
    "Trainer",
    "UsageError",
    "VarunaError",
    "Weights",
    "WorkerError",
    "__version__",
    "all_reduce_shared",
    "owned",
]


_LATE = {
    "Checkpoints": "varuna.job.options",
    "Collate": "varuna.job.options",
    "Evaluation": "varuna.results",
    "Loss": "varuna.job.options",
    "Memory": "varuna.core.model",
    "Network": "varuna.core.model",
    "Publish": "varuna.job.options",
    "Step": "varuna.results",
    "Trainer": "varuna.trainer",
    "Weights": "varuna.job.options",
    "all_reduce_shared": "varuna.engine.stage.cross_stage",
    "owned": "varuna.engine.stage.cross_stage",
}
"""Modules of the names that are loaded when asked for: planning and the command line run without torch."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'varuna' has no attribute {name!r}")
    return getattr(_load(_LATE[name]), name)


def __dir__() -> list[str]:
    return __all__


def _load(module: str) -> Any:
    """A few thousand modules come with torch.export; garbage collections while they load take a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    except (ImportError, AttributeError) as error:
        if remedy := _remedy(error, _torch_version()):
            raise ImportError(f"{error}. {remedy}") from error
        raise
    finally:
        if was_enabled:
            gc.enable()


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _remedy(error: Exception, torch_version: str | None) -> str:
    """Return a remedy for an error while torch, or what uses it, is imported; empty if none is known."""
    if torch_version is None or getattr(error, "name", None) == "torch":
        return "Training needs torch. In a clone of Varuna: pip install '.[torch]'"
    if is_tested_torch(torch_version):
        return ""
    return f"Varuna {__version__} needs torch{TORCH_RANGE}, found {torch_version}: pip install 'torch{TORCH_RANGE}'"
