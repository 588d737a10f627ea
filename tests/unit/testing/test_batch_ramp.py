"""A batch that grows: the losses of a plain loop in any plan, after losses of workers and resumes; or a refusal."""

import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import varuna
from tests.unit.testing.situations import BATCH, Net, OverVaruna, PlainLoop, Points, Way, built, cross_entropy
from varuna.core.errors import UsageError
from varuna.testing import fail_at, run


def sizes(step: int) -> int:
    return [1, 2, 5, 8][step]


def right(output: Any, batch: Any) -> dict[str, Any]:
    return {"seen": (output.argmax(-1) >= 0).sum()}


def train(way: Way, **options: Any) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=cross_entropy, batch_ramp=sizes, **options)


@pytest.fixture(scope="module")
def plain() -> list[float]:
    loop = PlainLoop()
    train(loop)
    return loop.losses


def test_two_replicas_of_which_one_dies_see_the_samples_of_a_plain_loop(plain: list[float]) -> None:
    """In step 0 the second replica has nothing but stand-ins."""
    outcome = run(
        lambda: train(OverVaruna(), micro_batch=1), workers=4, stages={4: 2, 3: 1}, faults=[fail_at(rank=3, step=2)]
    )
    assert outcome.losses == pytest.approx(plain, rel=1e-5)


def test_examples_epochs_and_metrics_are_those_of_the_samples_that_are_there() -> None:
    model, optimizer = built()
    trainer = varuna.Trainer(
        model, Points(), optimizer, BATCH, loss=cross_entropy, batch_ramp=sizes, metrics=right, micro_batch=2,
        device="cpu",
    )  # fmt: skip
    steps = list(trainer.steps(4))
    assert [step.examples for step in steps] == [1, 2, 5, 8]
    assert [step.metrics["seen"] for step in steps] == [1, 2, 5, 8]
    assert [step.epoch for step in steps] == pytest.approx([1 / 40, 3 / 40, 8 / 40, 16 / 40])


def test_a_run_that_resumes_goes_on_with_its_samples(tmp_path: Path, plain: list[float]) -> None:
    found: dict[int, float] = {}
    for steps in (2, 4):
        model, optimizer = built()
        saved = varuna.Checkpoints(tmp_path, every=1)
        trainer = varuna.Trainer(
            model, Points(), optimizer, BATCH, loss=cross_entropy, batch_ramp=sizes, checkpoints=saved, device="cpu"
        )
        found |= {step.index: step.loss for step in trainer.steps(steps)}
    assert [found[step] for step in range(4)] == pytest.approx(plain, rel=1e-5)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.BatchNorm1d(12))


def test_what_would_count_stand_ins_is_refused() -> None:
    _, optimizer = built()
    with pytest.raises(UsageError, match=r"batch_ramp= cannot be given where the model updates middle\.0"):
        next(
            varuna.Trainer(
                Normed, Points(), lambda named: type(optimizer)([p for _, p in named], lr=0.1), BATCH,
                loss=cross_entropy, batch_ramp=sizes, micro_batch=2, device="cpu",
            ).steps(4)
        )  # fmt: skip
    model, optimizer = built()
    largest: Any = sizes
    with pytest.raises(UsageError, match=r"global_batch= is a function.*batch_ramp="):
        varuna.Trainer(model, Points(), optimizer, largest)
    with pytest.raises(UsageError, match=r"batch_ramp= at .*another answer"):
        OverVaruna().train(
            model, Points(), optimizer, loss=cross_entropy, batch_ramp=lambda step: random.randint(1, BATCH)
        )
