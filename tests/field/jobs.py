"""Jobs of the field: a model by name, and how its parts are made."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

GLOBAL_BATCH = 8
STEPS = 3
SEED = 0
CLIP = 1.0
RATE = 0.05
MODEST_PARAMETERS, MOST_PARAMETERS = 12_000_000, 60_000_000
"""Of a job: a larger one is taken where there is none of the first size; beyond the second, none."""


@dataclass(frozen=True, order=True)
class Job:
    """A model of a library.

    Attributes:
        library: where it comes from.
        family: the library's own name of its kind, such as a ``model_type``.
        model: its class, or its name in the library's registry.
        kind: what its targets are.
    """

    library: str
    family: str
    model: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.library}/{self.family}/{self.model}"


@dataclass(frozen=True)
class Attempt:
    """The way in which a job is to be run.

    Attributes:
        candidate: which way to make samples, counted from the likeliest; None: not known yet.
        micro_batch: given by the user; None: the trainer chooses.
        per_micro_batch: a loss that mixes examples may do so within each.
        cut: number of cut-points, given by the user, likewise.
        even: all samples count the same.
        briefly: in one plan only, of two stages and two replicas.
    """

    job: Job
    candidate: int | None = None
    micro_batch: int | None = None
    per_micro_batch: bool = False
    cut: int | None = None
    even: bool = False
    briefly: bool = False


@dataclass(frozen=True)
class Prepared:
    """A job's parts: as a user's script has them."""

    build: Callable[[], nn.Module]
    dataset: Any
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    """of the output and the batch, where the model returns none"""
    otherwise: bool = False
    """the same as before in another configuration, for models that cannot compute in the first"""


def patience() -> float:
    """By how much every bound is longer on a machine that others use, too."""
    return min(6.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def quiet(module: nn.Module) -> nn.Module:
    """The same module without dropout: what is left is the same in any order of computation."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) or type(part).__name__ == "StochasticDepth":
            part.p = 0.0  # type: ignore[assignment]  # torchvision's module
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return module
