"""Samples that come while a run trains: without a wait for each other, in any plan, and again in a replay."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varuna
from varuna.extras.rollouts import Rollouts, append
from varuna.testing import fail_at, run

BATCH, STEPS = 16, 6


class Dropping(nn.Module):
    """Each section draws random numbers, as a sample that is read may."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return nn.functional.mse_loss(x, y)


def play(place: Path, version: int) -> None:
    x = torch.randn(BATCH + version % 3, 4)
    append(place, {"x": x, "y": x.roll(1, 1)}, version=version)


def losses(place: Path, *, plays: bool) -> list[float]:
    """Train; with ``plays``, the samples of a step are there only once the step before it has ended."""
    dataset = Rollouts(place, batch=BATCH, staleness=0, wait_s=60)
    trainer = varuna.Trainer(
        Dropping,
        dataset,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        global_batch=BATCH,
        micro_batch=4,
    )
    found = []
    for step in trainer.steps(STEPS):
        found.append(step.loss)
        if plays and step.is_main:
            play(place, step.index + 1)
    return found


def test_training_does_not_stand_still_while_the_next_samples_are_waited_for(tmp_path: Path) -> None:
    play(tmp_path, 0)
    lost = fail_at(rank=1, step=3, phase="B")
    found = run(lambda: losses(tmp_path, plays=True), workers=3, stages={3: 3, 2: 2}, faults=[lost]).losses
    assert len(set(found)) == STEPS
    assert losses(tmp_path, plays=False) == pytest.approx(found, rel=1e-6)
