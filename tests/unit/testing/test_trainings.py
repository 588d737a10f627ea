"""Scripts of several trainings, on workers of which some die, and some had no part in the end of one."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varuna
from varuna.core.errors import FleetError
from varuna.testing import RunResult, fail_at, run

STEPS = (2, 4)
RATES = (0.1, 0.02)


def sample(index: int) -> dict[str, Tensor]:
    x = torch.randn(4, generator=torch.Generator().manual_seed(index))
    return {"input": x, "y": x.sum(0, keepdim=True)}


DATA = [sample(index) for index in range(24)]


def built(hidden: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    draws = torch.Generator().manual_seed(hidden)  # workers are threads, and share the default one
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=draws) / 2)
    return model


def trainer_of(model: nn.Module, rate: float, checkpoints: str | None) -> varuna.Trainer:
    return varuna.Trainer(
        model,
        DATA,
        torch.optim.Adam(model.parameters(), lr=rate),
        global_batch=8,
        micro_batch=2,
        loss=lambda output, batch: nn.functional.mse_loss(output, batch["y"]),
        checkpoints=checkpoints,
    )


def script(folder: Path | None = None) -> list[tuple[float, float]]:
    """For each training the loss of other data, and the sum of all weights."""
    found = []
    for number, (steps, rate) in enumerate(zip(STEPS, RATES, strict=True)):
        model = built(8 + number)
        trainer = trainer_of(model, rate, None if folder is None else str(folder / str(number)))
        for _ in trainer.steps(steps):
            pass
        loss = trainer.evaluate(DATA, examples=16).loss
        found.append((loss, float(sum(value.double().sum() for value in model.state_dict().values()))))
    return found


@pytest.fixture(scope="module")
def alone() -> RunResult:
    outcome = run(script)
    assert len(outcome.losses) == sum(STEPS)
    return outcome


def test_trainings_follow_one_another_on_several_workers(alone: RunResult) -> None:
    outcome = run(script, workers=2, stages=2)
    assert outcome.losses == alone.losses
    assert outcome.plans == ("2x1", "2x1")
    assert [*outcome.returned.values()] == [*alone.returned.values()] * 2


def test_a_worker_dies_in_the_second_training_alone(alone: RunResult) -> None:
    outcome = run(script, workers=2, stages={2: 2, 1: 1}, faults=[fail_at(rank=1, step=3, phase="B")])
    assert outcome.plans == ("2x1", "2x1", "1x1")
    assert outcome.losses == alone.losses
    assert outcome.returned["w0"] == alone.returned["w0"]


def test_a_spare_reads_what_a_training_has_left_from_its_last_checkpoint(alone: RunResult, tmp_path: Path) -> None:
    outcome = run(lambda: script(tmp_path), workers=3, stages=2)
    assert outcome.losses == alone.losses
    assert [*outcome.returned.values()] == [*alone.returned.values()] * 3


@pytest.mark.nightly
def test_a_spare_that_asks_for_what_nobody_has_kept_is_told_so() -> None:
    def asks() -> str:
        trainer = trainer_of(built(8), 0.1, None)
        steps = len(list(trainer.steps(3)))
        if steps:
            return ""
        with pytest.raises(
            FleetError, match=r"training 1 of the script ended without this worker.*checkpoints="
        ) as told:
            trainer.evaluate(DATA, examples=16)
        return str(told.value)

    assert sum(bool(text) for text in run(asks, workers=3, stages=2).returned.values()) == 1


def test_a_training_inside_of_another_ones_loop_is_refused() -> None:
    def nested() -> None:
        for _ in trainer_of(built(8), 0.1, None).steps(3):
            for _ in trainer_of(built(9), 0.1, None).steps(2):
                pass

    with pytest.raises(FleetError, match="begins training 2 of the script, and training 1 is not over"):
        run(nested)


@pytest.mark.nightly
def test_a_loop_that_breaks_off_ends_its_training() -> None:
    def breaks() -> list[int]:
        found = []
        for hidden in (8, 9):
            for step in trainer_of(built(hidden), 0.1, None).steps(10):
                found.append(step.index)
                if step.index == 1:
                    break
        return found

    outcome = run(breaks, workers=2, stages=2)
    assert [*outcome.returned.values()] == [[0, 1, 0, 1]] * 2
    assert len(outcome.losses) == 6  # a step more than each loop saw, which the flag travelled with


def test_what_a_script_draws_behind_a_loop_follows_from_what_it_drew_before() -> None:
    torch.manual_seed(3)
    random.seed(3)
    first, second = (torch.rand(3), random.random()), (torch.rand(3), random.random())
    model = built(8)
    model.insert(1, nn.Dropout(0.1))
    trainer = trainer_of(model, 0.1, None)
    torch.manual_seed(3)
    random.seed(3)
    assert torch.equal(torch.rand(3), first[0])
    assert random.random() == first[1]
    for _ in trainer.steps(2):
        torch.rand(1)
        random.random()
    assert torch.equal(torch.rand(3), second[0])
    assert random.random() == second[1]
