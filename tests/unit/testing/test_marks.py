"""Attributes of parameters that a constructor sets are on every parameter that the user's functions see."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.depth import of_depth
from tests.unit.engine.models import SmallLanguage, Tokens
from tests.unit.engine.plain import reference
from tests.unit.engine.ranks import Setup, single_threaded
from varuna.core.model import Memory
from varuna.job.options import Checkpoints
from varuna.testing import fail_at, run
from varuna.trainer import Trainer


class Width(nn.Parameter):
    """A class of parameters of the user's own."""


class Marked(SmallLanguage):
    """Marks parameters in the ways that public models do."""

    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.no_weight_decay = True  # type: ignore[attr-defined]
        self.layers[1].weight = Width(self.layers[1].weight.detach().clone())
        for layer in self.layers:
            layer.bias.options = {"lr": 0.05}


def by_marks(named: Any) -> torch.optim.Optimizer:
    kinds: dict[str, list[Any]] = {"plain": [], "undecayed": [], "own": [], "wide": []}
    for _, p in named:
        kind = "undecayed" if getattr(p, "no_weight_decay", False) else "own" if hasattr(p, "options") else "plain"
        kinds["wide" if isinstance(p, Width) else kind].append(p)
    own = kinds["own"][0].options if kinds["own"] else {}
    return torch.optim.AdamW(
        [
            {"params": kinds["plain"], "weight_decay": 2.0},
            {"params": kinds["undecayed"], "weight_decay": 0.0},
            {"params": kinds["wide"], "lr": 0.03},
            {"params": kinds["own"], **own},
        ],
        lr=1e-2,
    )


def halved(named: Any) -> None:
    for _, p in named:
        if hasattr(p, "options"):
            p.grad.mul_(-1.0)


def expected(steps: int) -> list[float]:
    with single_threaded():
        return [loss for loss, _ in reference(Setup(build=Marked, optimizer=by_marks), steps)]


@pytest.mark.parametrize("how", of_depth(["function", "built", "offloaded"], {"built"}))
def test_an_optimizers_function_reads_the_marks_in_every_plan_and_after_a_morph(how: str, tmp_path: Path) -> None:
    def script() -> None:
        torch.manual_seed(0)
        model: Any = Marked() if how == "built" else Marked
        memory = Memory(offload_optimizer=how == "offloaded")
        saved = Checkpoints(tmp_path, every=2)
        job = Trainer(model, Tokens(), by_marks, 8, clip_grad_norm=1.0, micro_batch=2, memory=memory, checkpoints=saved)
        for _ in job.steps(6):
            pass

    lived = run(script, workers=3, stages={3: 3, 2: 2}, faults=[fail_at(rank=1, step=3)])
    assert lived.plans == ("3x1", "2x1")
    assert lived.losses == pytest.approx(expected(6), rel=1e-5)


@pytest.mark.nightly
def test_before_step_sees_the_marks_also_in_bf16() -> None:
    def losses(**more: Any) -> list[float]:
        job = Trainer(Marked, Tokens(), by_marks, 8, clip_grad_norm=1.0, micro_batch=2, device="cpu", **more)
        return [step.loss for step in job.steps(4)]

    assert losses(before_step=halved)[-1] > losses()[-1] + 1e-2
    assert losses(before_step=halved, precision="bf16") == pytest.approx(losses(before_step=halved), rel=1e-2)
