"""State that an update keeps beside parameters, draws, needs of others: the same in every plan, or refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.depth import of_depth
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.engine.stage.optimizers import KINDS, Noisy, values
from tests.unit.testing.test_resuming import train
from varuna.core.errors import WorkerError
from varuna.testing import fail_at, run
from varuna.trainer import Trainer


def noisy(named: Any) -> torch.optim.Optimizer:
    return Noisy(values(named), lr=0.1)


def noise(named: Any) -> None:
    """A rate of noise for the whole step, and noise for each parameter."""
    rate = 0.01 * torch.rand(())
    for _, p in named:
        p.grad.add_(rate * torch.randn_like(p.grad))


@pytest.mark.parametrize("name", of_depth(KINDS, {"wrapper"}))
def test_every_plan_and_a_resumed_run_train_as_a_plain_loop(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    place = str(tmp_path)
    with single_threaded():
        expected = reference(Setup(optimizer=kind), 5)
        assert worst(Setup(optimizer=kind).losses(2, 2, 5), expected) < 1e-5
        first = train(Setup(optimizer=kind, directory=place), 1, 1, 3, place)
        assert worst([*first, *train(Setup(optimizer=kind, directory=place), 3, 1, 5, place)], expected) < 1e-5


@pytest.mark.parametrize("kind", of_depth(["counter in the group", "wrapper", "two groups"], {"wrapper"}))
def test_a_killed_worker_changes_nothing_of_what_an_optimizer_counts(kind: str) -> None:
    make: Any = KINDS[kind]

    def script() -> None:
        for _ in Trainer(SmallLanguage, Tokens(), make, 8, clip_grad_norm=1.0, micro_batch=2).steps(6):
            pass

    lived = run(script, workers=3, stages={3: 3, 2: 2}, faults=[fail_at(rank=1, step=3)])
    assert lived.plans == ("3x1", "2x1")
    with single_threaded():
        expected = [loss for loss, _ in reference(Setup(optimizer=make), 6)]
    assert lived.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [pytest.param({"optimizer": noisy}, marks=pytest.mark.nightly), {"before_step": noise}],
    ids=["optimizer", "before_step"],
)
def test_what_an_update_draws_depends_on_no_plan(given: dict[str, Any], tmp_path: Path) -> None:
    place = str(tmp_path)
    with single_threaded():
        alone = Setup(**given)
        expected = alone.losses(1, 1, 4)
        assert worst(Setup(**given, seed=1).losses(1, 1, 4), expected) > 1e-3
        for stages, replicas in ((2, 1), (2, 2)):
            setup = Setup(**given)
            assert worst(setup.losses(stages, replicas, 4), expected) < 1e-5
            torch.testing.assert_close(setup.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)
        first = train(Setup(**given, directory=place), 2, 1, 2, place)
        assert worst([*first, *train(Setup(**given, directory=place), 1, 1, 4, place)], expected) < 1e-5


class Faulty(torch.optim.SGD):
    """On one of two replicas, it writes one other bit into one parameter, or NaN in the third step."""

    made, value = 0, 0.0

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.is_faulty, self.steps = Faulty.made == 1, 0
        Faulty.made += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        biases: list[Tensor] = [p for p in self.param_groups[0]["params"] if p.dim() == 1]
        self.steps += 1
        if self.is_faulty and not Faulty.value:
            biases[1].view(torch.int32)[3] ^= 1
        elif self.is_faulty and self.steps == 3:
            biases[1][3] = Faulty.value


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_replicas_that_are_not_alike_end_the_run_with_the_parameters_name(value: float) -> None:
    Faulty.made, Faulty.value = 0, value
    with pytest.raises(WorkerError, match=r"replicas of section \d+ hold different values of layers\.1\.bias\."):
        Setup(optimizer=lambda named: Faulty(values(named))).run(1, 2, 4)


def test_replicas_that_are_alike_are_compared_and_go_on() -> None:
    setup = Setup(optimizer=adamw)
    compared = [each.totals.compare for each in setup.run(2, 2, 3)[0]]
    assert compared[0]
    assert not any(each.totals.compare for each in Setup(optimizer=adamw).run(2, 1, 3)[0])
