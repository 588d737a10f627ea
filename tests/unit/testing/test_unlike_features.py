"""A trainer's features besides steps, on pipelines of different depth: all of them as in one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import varuna
from tests.unit.engine.models import Dropping, Tokens, adamw
from tests.unit.testing.test_kept_statistics import Normalised
from tests.unit.testing.work import CAPTURES
from varuna.testing import RunResult, fail_at, run

STEPS, MICRO_BATCHES = 4, 12
DEPTHS = (3, 2, 1)


def same_losses(found: RunResult, alone: RunResult, rel: float = 1e-6) -> None:
    assert found.plans == ("3x1+2x1+1x1",)
    assert found.losses == pytest.approx(alone.losses, rel=rel)


def trainer(model: Callable[[], Any] = Dropping, optimizer: Any = adamw, **options: Any) -> varuna.Trainer:
    data = Tokens(padded=True)
    return varuna.Trainer(model, data, optimizer, MICRO_BATCHES, **{"micro_batch": 1, "clip_grad_norm": 1.0, **options})


def looked_at() -> float:
    made = trainer()
    list(made.steps(STEPS))
    return made.evaluate(Tokens(size=23)).loss


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_evaluations_are_those_of_one_process() -> None:
    alone, found = run(looked_at, captures=CAPTURES), run(looked_at, workers=6, stages=DEPTHS, captures=CAPTURES)
    same_losses(found, alone)
    [loss] = alone.returned.values()
    assert list(found.returned.values()) == pytest.approx([loss] * 6)


def normalised() -> float:
    made = varuna.Trainer(Normalised, Tokens(), shared_free, 3 * MICRO_BATCHES, micro_batch=3, clip_grad_norm=1.0)
    list(made.steps(STEPS))
    return made.evaluate(Tokens()).loss


def shared_free(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_running_statistics_of_batch_normalisation_are_those_of_one_process() -> None:
    faults = [fail_at(rank=4, step=2, phase="B", after=2)]
    found = run(normalised, workers=5, stages={5: (3, 2), 4: (3, 1)}, faults=faults, captures=CAPTURES)
    alone = run(normalised, captures=CAPTURES)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    [loss] = alone.returned.values()
    assert list(found.returned.values()) == pytest.approx([loss] * len(found.returned), rel=1e-5)


def saving(folder: Path, steps: int) -> None:
    made = trainer(checkpoints=varuna.Checkpoints(str(folder / "saved"), every=2))
    list(made.steps(steps))
    made.export(folder / "model.safetensors")


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_checkpoint_of_unlike_pipelines_is_one_of_the_model(tmp_path: Path) -> None:
    """Saved by (3, 2), gone on with by (3, 2, 1): what is exported is what one process trains."""
    run(partial(saving, tmp_path, 2), workers=5, stages=(3, 2), captures=CAPTURES)
    run(partial(saving, tmp_path, 4), workers=6, stages=DEPTHS, captures=CAPTURES)
    plain = tmp_path / "plain"
    plain.mkdir()
    run(partial(saving, plain, 4), captures=CAPTURES)
    found, expected = load_file(tmp_path / "model.safetensors"), load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
