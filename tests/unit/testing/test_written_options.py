"""Options that the loop writes into the optimizer's groups train as in a plain loop: over losses and resumes, too."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

import varuna
from tests.unit.engine.ranks import single_threaded
from varuna import VarunaError
from varuna.data import sample_index
from varuna.data.randomness import generator_lock
from varuna.testing import FailingStore, fail_at, run

STEPS, BATCH = 8, 8
Rule = Callable[[torch.optim.Optimizer, int], Any]
Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


class Layers(nn.Module):
    """Its first layer is frozen, so that a stage may have nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, step: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        near = (x[:, :2] - y).pow(2).mean(-1)
        return (near + 0.1 * step * x.pow(2).mean(-1)).mean()


def points() -> list[dict[str, Tensor]]:
    drawn = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": row[:6], "y": row[6:]} for row in drawn]


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    with generator_lock:
        torch.manual_seed(3)
        model = Layers()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in trained if p.dim() < 2], "lr": 0.3}]
    return model, torch.optim.SGD(groups, lr=0.2, momentum=0.9)


def by_hand(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the options for ``step``: a rate that follows it, one that follows itself, a decay, the momentum."""
    first, second = optimizer.param_groups
    first["lr"] = 0.2 / (1 + step)
    if step:
        second["lr"] *= 0.8
    if step == 3:
        first.update(weight_decay=0.0, momentum=0.5)


def plain(rule: Rule, schedule: Schedule | None = None) -> list[tuple[float, float]]:
    """Loss and rate of each step of a plain loop, which writes before each step."""
    model, optimizer = built()
    scheduler = None if schedule is None else schedule(optimizer)
    found, data = [], points()
    for step in range(STEPS):
        rule(optimizer, step)
        rows = [data[sample_index(step * BATCH + i, size=len(data), seed=0)] for i in range(BATCH)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        loss = model(**batch, step=torch.full((BATCH,), step))
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return found


def script(
    rule: Rule = by_hand,
    schedule: Schedule | None = None,
    steps: int = STEPS,
    checkpoints: Any = None,
) -> dict[int, tuple[float, float]]:
    """Loss and rate by step; a worker that gets the loop's state of another has not had its newest turn."""
    model, optimizer = built()
    trainer = varuna.Trainer(
        model,
        points(),
        optimizer,
        BATCH,
        micro_batch=2,
        lr_scheduler=None if schedule is None else schedule(optimizer),
        checkpoints=checkpoints,
        device="cpu",
    )
    rule(optimizer, 0)
    curve: dict[int, tuple[float, float]] = {}
    for step in trainer.steps(steps):
        curve[step.index] = step.loss, step.lr
        rule(optimizer, step.index + 1)
    return curve


@pytest.fixture(scope="module")
def captures() -> list[Any]:
    return []


def close(curve: dict[int, tuple[float, float]], expected: list[tuple[float, float]]) -> bool:
    return all(found == pytest.approx(expected[step], rel=1e-5) for step, found in curve.items())


def test_a_schedule_by_hand_is_that_of_a_plain_loop_over_the_loss_of_a_worker(captures: list[Any]) -> None:
    """Two stages, of which the first may train nothing, by two replicas; then three stages by one."""
    with single_threaded():
        expected = plain(by_hand)
    faults = [fail_at(rank=3, step=4, phase="apply")]
    lived = run(script, workers=4, stages={4: 2, 3: 3}, faults=faults, captures=captures)
    assert lived.plans == ("2x2", "3x1")
    assert len(lived.returned) == 3
    assert max(map(len, lived.returned.values())) == STEPS
    for curve in lived.returned.values():
        assert len(curve) >= STEPS - 1
        assert close(curve, expected)


@pytest.mark.nightly
def test_a_run_resumes_with_the_options_of_its_checkpoint(captures: list[Any]) -> None:
    """Rates that follow from those before are right, although the script begins with its own first ones."""
    with single_threaded():
        expected = plain(by_hand)
    place = varuna.Checkpoints(FailingStore().url, every=1)
    for steps, stages in ((1, 1), (5, 2)):  # the first checkpoint is from before the loop has written anything
        run(partial(script, steps=steps, checkpoints=place), workers=stages, stages=stages, captures=captures)
    [curve] = run(partial(script, checkpoints=place), captures=captures).returned.values()
    assert sorted(curve) == [4, 5, 6, 7], "the turn of the checkpoint's last step comes again"
    assert close(curve, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: StepLR(optimizer, 2, 0.5),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
    ids=["follows from the rate before", "follows from the step"],
)
def test_a_scheduler_does_with_a_written_rate_what_it_does_in_a_plain_loop(
    schedule: Schedule, captures: list[Any]
) -> None:
    def once(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 3

    with single_threaded():
        expected = plain(once, schedule)
    faults = [fail_at(rank=1, step=5, phase="vote")]
    lived = run(lambda: script(once, schedule), workers=2, stages={2: 2, 1: 1}, faults=faults, captures=captures)
    for curve in lived.returned.values():
        assert close(curve, expected)


def test_workers_that_write_different_options_are_refused_with_the_rank(captures: list[Any]) -> None:
    order: list[int] = []

    def script_of_one() -> None:
        mine = len(order)
        order.append(mine)
        script(lambda optimizer, step: optimizer.param_groups[0].update(lr=0.1 if step < 2 or mine else 0.2))

    with pytest.raises(VarunaError, match=r"rank \d.*(group 0: lr=0\.2|written none).*step\.index"):
        run(script_of_one, workers=3, stages=3, captures=captures)


LOOPS: dict[str, Schedule] = {
    "counts steps": lambda optimizer: StepLR(optimizer, 5, 0.5),
    "counts what did not help, and has not reduced yet": lambda optimizer: ReduceLROnPlateau(optimizer, patience=4),
    "two over the same groups, one after the other": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), StepLR(optimizer, 2, 0.5)], [3]
    ),
    "with what no checkpoint holds": lambda optimizer: LambdaLR(optimizer, Halving()),
}


class Halving:
    """A rate that cannot be saved, which follows from the number of steps."""

    def __init__(self) -> None:
        self.rate: Callable[[int], float] = lambda step: 0.5 ** (step // 3)

    def __call__(self, step: int) -> float:
        return self.rate(step)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_scheduler_that_the_loop_steps_goes_on_over_a_resume_and_a_loss(kind: str, captures: list[Any]) -> None:
    made: dict[int, Any] = {}

    def steps_it(optimizer: torch.optim.Optimizer, step: int) -> None:
        schedule = made.get(id(optimizer))
        if schedule is None:
            made[id(optimizer)] = LOOPS[kind](optimizer)
        elif isinstance(schedule, ReduceLROnPlateau):
            schedule.step(1.0)
        else:
            schedule.step()

    with single_threaded():
        expected = plain(steps_it)
    assert len({rate for _, rate in expected}) > 1
    place = varuna.Checkpoints(FailingStore().url, every=1)
    run(partial(script, steps_it, steps=5, checkpoints=place), captures=captures)
    again = run(
        partial(script, steps_it, checkpoints=place),
        workers=2,
        stages={2: 2, 1: 1},
        faults=[fail_at(rank=1, step=6, phase="apply")],
        captures=captures,
    )
    for curve in again.returned.values():
        assert min(curve) == 4
        assert close(curve, expected)
