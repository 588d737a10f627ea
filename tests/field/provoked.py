"""Jobs that end badly on purpose, so that the sorting itself is tested."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.field.jobs import Attempt, Job, Prepared
from tests.field.samples import Drawn, generator_of


class Plain(nn.Module):
    """Trains as it should."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(self.seen(x), target)

    def seen(self, x: Tensor) -> Tensor:
        return x


class Waits(Plain):
    """Never comes back from its first forward under Varuna."""

    def seen(self, x: Tensor) -> Tensor:
        while is_varunas():
            time.sleep(0.1)
        return x


class Dies(Plain):
    """Takes its process with it under Varuna."""

    def seen(self, x: Tensor) -> Tensor:
        if is_varunas():
            os.kill(os.getpid(), signal.SIGSEGV)
        return x


class Refused(Plain):
    """Cannot be built under Varuna."""

    def __init__(self) -> None:
        super().__init__()
        if is_varunas():
            raise ValueError("not here")


class Strays(Plain):
    """Computes something else under Varuna."""

    def seen(self, x: Tensor) -> Tensor:
        return x * 1.001 if is_varunas() else x


class Aimless(Plain):
    """Plain PyTorch cannot train it, either."""

    def seen(self, x: Tensor) -> Tensor:
        return x * float("nan")


def is_varunas() -> bool:
    """Whether this process is one that runs jobs with Varuna: references are computed in another."""
    return "tests.field.trained" in sys.modules


KINDS: dict[str, type[Plain]] = {kind.__name__: kind for kind in (Plain, Waits, Dies, Refused, Strays, Aimless)}


def jobs() -> tuple[Job, ...]:
    """One of each."""
    return tuple(Job("provoked", name, name, "class") for name in KINDS)


def _sample(index: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(8, generator=generator_of(index)),
        "target": torch.randn(8, generator=generator_of(-index)),
    }


def ways(attempt: Attempt) -> Iterator[Prepared]:
    """The only one."""
    yield Prepared(KINDS[attempt.job.model], Drawn(_sample))
