"""What a trainer offers besides steps, on pipelines of different depth: all of it as in one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import varuna
from tests.unit.engine.models import Dropping, Tokens, adamw, tiny_gpt2
from tests.unit.testing.test_kept_statistics import Normalised
from tests.unit.testing.work import CAPTURES
from varuna.testing import RunResult, fail_at, run

STEPS, MICRO_BATCHES = 4, 12
DEPTHS = (3, 2, 1)


class Shared(torch.optim.SGD):
    """Divides by the norm over all parameters of the model, whoever has them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        mine = [p for group in self.param_groups for p in group["params"]]
        squares = sum((p.grad.double().pow(2).sum() for p in mine if varuna.owned(p)), torch.zeros(()).double())
        norm = varuna.all_reduce_shared(squares).sqrt()
        for p in mine:
            p.add_(p.grad / norm.float(), alpha=-0.05)


def shared(named: Any) -> torch.optim.Optimizer:
    return Shared([p for _, p in named], lr=0.1)


def same_losses(found: RunResult, alone: RunResult, rel: float = 1e-6) -> None:
    assert found.plans == ("3x1+2x1+1x1",)
    assert found.losses == pytest.approx(alone.losses, rel=rel)


def trainer(model: Callable[[], Any] = Dropping, optimizer: Any = adamw, **options: Any) -> varuna.Trainer:
    data = Tokens(padded=True)
    return varuna.Trainer(model, data, optimizer, MICRO_BATCHES, **{"micro_batch": 1, "clip_grad_norm": 1.0, **options})


def trained(**options: Any) -> int:
    return len(list(trainer(**options).steps(STEPS)))


@pytest.mark.nightly
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("options", "rel"),
    [
        ({"optimizer": shared, "clip_grad_norm": None}, 1e-6),
        ({"memory": varuna.Memory(offload_optimizer=True)}, 1e-6),
        ({"memory": varuna.Memory(shard_optimizer=True)}, 1e-6),
        ({"network": varuna.Network(reduction="bf16")}, 1e-3),
        ({"precision": "bf16"}, 1e-2),
        ({"model": tiny_gpt2}, 1e-6),
    ],
    ids=["shared norm", "offload", "shard", "bf16 sums", "bf16", "tied"],
)
def test_every_option_trains_as_one_process(options: dict[str, Any], rel: float) -> None:
    script = partial(trained, **options)
    same_losses(run(script, workers=6, stages=DEPTHS, captures=CAPTURES), run(script, captures=CAPTURES), rel)


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
@pytest.mark.parametrize("kills", [False, True])
def test_running_statistics_of_batch_normalisation_are_those_of_one_process(kills: bool) -> None:
    faults = [fail_at(rank=4, step=2, phase="B", after=2)] if kills else []
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
