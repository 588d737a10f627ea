"""Writes of ``after_step`` are state: the same in any plan, for every holder, and after whatever happens to a run."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.depth import by_depth, nightly, nightly_rows
from tests.unit.engine.ranks import single_threaded
from tests.unit.testing.carrying import (
    GLOBAL,
    MICRO,
    STEPS,
    Balanced,
    Centred,
    Points,
    Taught,
    balance,
    follow,
    one_process,
    setup,
    sgd,
    state_of,
    teach,
)
from varuna.core.errors import UsageError
from varuna.job.options import Checkpoints
from varuna.testing import fail_at, run
from varuna.trainer import Trainer

CASES = [(Taught, follow), *nightly_rows((Balanced, balance))]
SHAPES = by_depth([(3, 1), (2, 2)], [(1, 1), (3, 1), (2, 2)])


def plainly(after: Any) -> Any:
    return after if after is balance else lambda parameters, buffers, _step: after(parameters, buffers)


@pytest.mark.parametrize(("build", "after"), CASES)
def test_losses_and_state_are_those_of_a_plain_loop(build: Any, after: Any) -> None:
    with single_threaded():
        expected, model = one_process(build, plainly(after))
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for shape in SHAPES:
            job = setup(build, after_step=after)
            found = job.losses(*shape, steps=len(expected))
            assert [loss for loss, _ in found] == pytest.approx(expected, rel=1e-5), shape
            state = state_of(job)
            assert set(state) == {name for name in named if name != "unused.bias"}
            for name, value in state.items():
                torch.testing.assert_close(value, named[name].detach(), rtol=1e-4, atol=1e-5)


def dino(steps: int, folder: Path | None = None) -> dict[str, Tensor]:
    """A script that trains a model that it has built, and gives it back."""
    torch.manual_seed(0)
    model = Centred()
    trainer = Trainer(
        model,
        Points(),
        sgd,
        GLOBAL,
        micro_batch=MICRO,
        after_step=teach,
        checkpoints=None if folder is None else Checkpoints(folder, every=1),
    )
    for _ in trainer.steps(steps):
        pass
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


CAPTURES: list[Any] = []


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    with single_threaded():
        losses, model = one_process(Centred, plainly(teach))
    return losses, {**dict(model.named_parameters()), **dict(model.named_buffers())}


IN_THE_MIDDLE = {"rank": 1, "step": 1, "phase": "B"}
AFTER_A_VOTE = {"rank": 2, "step": 2, "phase": "vote", "at_end": True}


@pytest.mark.parametrize("fault", [IN_THE_MIDDLE, *nightly(AFTER_A_VOTE)])
def test_a_killed_worker_changes_nothing(fault: Any, plain: tuple[list[float], dict[str, Tensor]]) -> None:
    shapes = {4: 2, 3: 3}
    outcome = run(partial(dino, STEPS), workers=4, stages=shapes, faults=[fail_at(**fault)], captures=CAPTURES)
    assert outcome.plans == ("2x2", "3x1")
    assert outcome.losses == pytest.approx(plain[0], rel=1e-5)
    given = list(outcome.returned.values())
    for name, value in plain[1].items():
        torch.testing.assert_close(given[0][name], value, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(each[name], given[0][name]) for each in given)


@pytest.mark.nightly
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    (whole,) = run(partial(dino, 4), captures=CAPTURES).returned.values()
    run(partial(dino, 2, tmp_path), workers=2, stages=2, captures=CAPTURES)
    outcome = run(partial(dino, 4, tmp_path), workers=3, stages=3, captures=CAPTURES)
    assert len(outcome.losses) == 2
    for found in outcome.returned.values():
        assert all(torch.equal(found[name], value) for name, value in whole.items())


def odd_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], step: int) -> None:
    follow(parameters, buffers)
    if step == 1:
        parameters["teacher.0.0.weight"].add_(parameters["student.2.0.bias"].mean())


def test_what_the_dry_run_did_not_show_is_refused_before_it_is_written() -> None:
    job = setup(Taught, after_step=odd_one)
    with (
        single_threaded(),
        pytest.raises(UsageError, match=r"teacher\.0\.0\.weight from student\.2\.0\.bias in step 1"),
    ):
        job.losses(3, 1, steps=2)


def replacing(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    buffers["updates"] = buffers["updates"] + 1


def idle(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    _ = parameters["teacher.0.0.weight"] * 0.9


def drawing(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    parameters["teacher.0.0.weight"].normal_(generator=torch.Generator())


@pytest.mark.parametrize(
    ("function", "message"),
    [(replacing, r"write 'updates' in place"), (idle, "wrote to no parameter"), (drawing, "default generator")],
)
def test_what_would_have_no_effect_or_another_on_each_worker_is_refused(function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        setup(Taught, after_step=function)


def renew(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Draw anew where experts got nothing, and a little everywhere."""
    counts = buffers["counts"]
    noise = torch.randn_like(parameters["experts"]) * 0.01
    parameters["experts"].add_(noise * (counts < 2)[:, None, None])
    parameters["after.0.0.bias"].add_(torch.rand(8) * 0.01)
    counts.zero_()


@pytest.mark.nightly
def test_draws_are_the_same_wherever_they_are_made() -> None:
    with single_threaded():
        runs = []
        for shape in [(1, 1), (3, 1), (1, 2)]:
            job = setup(Balanced, after_step=renew)
            job.losses(*shape, steps=3)
            runs.append(state_of(job))
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[2][name], value, rtol=1e-4, atol=1e-5)
