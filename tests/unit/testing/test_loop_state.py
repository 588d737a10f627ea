"""The user's own state: every turn of the loop is in it once, on every worker, whatever is lost, and after a resume."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import varuna
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.plain import train_plainly
from tests.unit.engine.ranks import Setup
from tests.unit.testing.work import CAPTURES
from varuna.core.errors import UsageError, VarunaError, WorkerError
from varuna.engine.worker.loop_state import LARGEST_BYTES, LoopState, LoopStep
from varuna.testing import FailingStore, fail_at, run

STEPS = 6


class Shuffler:
    """As a sampler: a generator whose draws go on, by torch's Stateful protocol."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def script(
    steps: int = STEPS, checkpoints: Any = None, *, turn: Callable[[varuna.Step, dict[Any, Any]], None] | None = None
) -> dict[str, Any]:
    notes: dict[Any, Any] = {"turns": [], "best": float("inf"), "draws": []}
    shuffler = Shuffler()
    trainer = varuna.Trainer(
        SmallLanguage,
        Tokens(),
        adamw,
        8,
        micro_batch=2,
        checkpoints=checkpoints,
        state={"notes": notes, "shuffler": shuffler},
    )
    for step in trainer.steps(steps):
        notes["turns"].append(step.index)
        notes["best"] = min(notes["best"], step.loss)
        notes["draws"].append(int(torch.randint(0, 1000, (), generator=shuffler.generator)))
        if turn is not None:
            turn(step, notes)
    return notes


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    notes: dict[str, Any] = run(script, captures=CAPTURES).returned["w0"]
    assert notes["turns"] == list(range(STEPS))
    return notes


def test_every_worker_goes_on_with_every_turn_after_a_loss(undisturbed: dict[str, Any]) -> None:
    lived = run(
        script, captures=CAPTURES, workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=0, step=2, phase="apply")]
    )
    assert lived.plans == ("2x2", "3x1")
    assert len(lived.returned) == 3
    for notes in lived.returned.values():
        assert notes["turns"] == list(range(STEPS))
        assert notes["draws"] == undisturbed["draws"]
        assert notes["best"] == pytest.approx(undisturbed["best"])


def test_a_run_resumes_with_the_state_of_its_checkpoint(undisturbed: dict[str, Any]) -> None:
    """The turn after the checkpoint's last step is not in it: the loop gets that step again."""
    store = FailingStore()
    place = varuna.Checkpoints(store.url, every=2)

    def breaks(step: varuna.Step, notes: dict[Any, Any]) -> None:
        if step.index == 3:
            raise RuntimeError("out of memory")

    with pytest.raises(WorkerError, match="out of memory"):
        run(lambda: script(checkpoints=place, turn=breaks), workers=2, stages=2, captures=CAPTURES)
    resumed = run(lambda: script(checkpoints=place), workers=2, stages=1, captures=CAPTURES)
    for notes in resumed.returned.values():
        assert notes == {**undisturbed, "best": pytest.approx(undisturbed["best"])}


def test_a_resumed_run_names_what_its_loop_counts_and_nobody_saves(capsys: pytest.CaptureFixture[str]) -> None:
    def counts(steps: int) -> None:
        best = float("inf")
        trainer = varuna.Trainer(SmallLanguage, Tokens(), adamw, 8, micro_batch=2, checkpoints=place)
        for step in trainer.steps(steps):
            best = min(best, step.loss)

    place = varuna.Checkpoints(FailingStore().url, every=2)
    run(lambda: counts(2), captures=CAPTURES)
    assert "its own best" not in capsys.readouterr().err
    run(lambda: counts(3), workers=2, stages=2, captures=CAPTURES)
    assert capsys.readouterr().err.count("the loop begins with its own best as the script has made it") == 1


class Noam:
    """The rate of the Transformer paper: an object around the optimizer, with a count of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.warmup, self.count = optimizer, 3, 0

    def advance(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.count**-0.5, self.count * self.warmup**-1.5)


def noam_script(steps: int = STEPS, checkpoints: Any = None) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = SmallLanguage()
    noam = Noam(torch.optim.AdamW(model.parameters()))
    noam.advance()
    trainer = varuna.Trainer(model, Tokens(), noam.optimizer, 8, micro_batch=2, checkpoints=checkpoints)
    rates = []
    for step in trainer.steps(steps):
        rates.append(step.lr)
        noam.advance()
    return rates, noam.count


def test_an_object_around_the_optimizer_counts_on_after_a_loss_and_after_a_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates, count = run(noam_script).returned["w0"]
    assert count == STEPS + 1
    lived = run(noam_script, workers=3, stages={3: 3, 2: 2}, faults=[fail_at(rank=1, step=2)])
    assert all(found[1] == count for found in lived.returned.values())
    place = varuna.Checkpoints(FailingStore().url, every=1)
    run(lambda: noam_script(3, place))
    resumed, count_then = run(lambda: noam_script(STEPS, place)).returned["w0"]
    assert (resumed[-3:], count_then) == (rates[-3:], count)
    assert "begins with its own" not in capsys.readouterr().err


def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.005)


def plain(steps: int) -> list[tuple[float, float]]:
    """Return loss and learning rate of each step of a plain loop, where the scheduler sees every second loss."""
    losses, rates, made = list[float](), list[float](), list[Any]()

    def build(named: Any) -> torch.optim.Optimizer:
        optimizer = adamw(named)
        made.extend((optimizer, plateau(optimizer)))
        return optimizer

    def advance(_model: object, loss: float) -> None:
        losses.append(loss)
        rates.append(made[0].param_groups[0]["lr"])
        if len(losses) % 2 == 0:
            made[1].step(loss)

    train_plainly(Setup(optimizer=build, clip=None), steps, observe=advance)
    return list(zip(losses, rates, strict=True))


def plateau_script(checkpoints: Any = None, fails: bool = False, wrong: bool = False) -> list[tuple[float, float]]:
    trainer = varuna.Trainer(
        SmallLanguage, Tokens(), adamw, 8, micro_batch=2, lr_scheduler=plateau, checkpoints=checkpoints
    )
    curve = []
    for step in trainer.steps(8):
        curve.append((step.loss, step.lr))
        if step.index % 2 and (step.is_main or not wrong):
            trainer.step_scheduler(step.loss)
        if fails and step.index == 4:
            raise RuntimeError("out of memory")
    return curve


@pytest.mark.nightly
def test_plateau_is_torchs_own_after_a_loss_and_after_a_resume() -> None:
    expected = plain(8)
    assert len({lr for _, lr in expected}) > 1
    lived = run(
        plateau_script,
        captures=CAPTURES,
        workers=4,
        stages={4: 2, 3: 3},
        faults=[fail_at(rank=1, step=5, phase="apply")],
    )
    assert lived.losses == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    place = varuna.Checkpoints(FailingStore().url, every=4)
    with pytest.raises(WorkerError, match="out of memory"):
        run(lambda: plateau_script(place, fails=True), workers=2, stages=2, captures=CAPTURES)
    resumed = run(lambda: plateau_script(place), workers=2, stages=1, captures=CAPTURES)
    for curve in resumed.returned.values():
        assert len(curve) in (3, 5)  # from step 3, or from 5: workers that fail at once may end the step that began
        assert curve == [pytest.approx(each, rel=1e-5) for each in expected[-len(curve) :]]


def test_a_scheduler_that_is_told_on_one_rank_only_is_refused() -> None:
    with pytest.raises(VarunaError, match="with different values, or on some workers only"):
        run(lambda: plateau_script(wrong=True), workers=2, stages=2, captures=CAPTURES)


def test_other_schedulers_and_other_kinds_of_state_are_refused() -> None:
    def other() -> None:
        trainer = varuna.Trainer(
            SmallLanguage,
            Tokens(),
            adamw,
            8,
            micro_batch=2,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        )
        with pytest.raises(UsageError, match="inside the loop"):
            trainer.step_scheduler(1.0)
        for step in trainer.steps(1):
            trainer.step_scheduler(step.loss)

    with pytest.raises(UsageError, match="Every other scheduler advances by itself"):
        run(other, captures=CAPTURES)
    wrong: Any
    for wrong, text in (([1], "must name what is saved"), ({"best": 1.0}, "is a float, which cannot be given back")):
        with pytest.raises(UsageError, match=text):
            varuna.Trainer(SmallLanguage, Tokens(), adamw, 8, state=wrong)
    with pytest.raises(UsageError, match="in each checkpoint, more than 4 MiB"):
        LoopState({"large": {"text": "x" * LARGEST_BYTES}})


def test_a_checkpoint_without_some_state_begins_it_as_the_script_does() -> None:
    old = LoopState({"a": {"n": 1}})
    saved = old.saved(None)
    b = {"n": 5}
    a = {"n": 0}
    both = LoopState({"a": a, "b": b})
    a["n"] = b["n"] = 9
    both.resume(saved, 4)
    assert (a, b, both.turns, both.owed) == ({"n": 1}, {"n": 5}, 4, ())
    both.restart()
    assert (a, b, both.turns) == ({"n": 0}, {"n": 5}, 0)


def test_a_step_whose_turn_is_missing_is_owed_to_the_loop() -> None:
    from varuna.core.vote import StepTotals

    totals = StepTotals(
        loss=1.5, weight=8.0, grad_norm=1.0, metrics={}, stop=False, regroup=False, checkpoint=False, lr=0.1
    )
    kept: dict[Any, Any] = {"n": 1}
    loop = LoopState({"a": kept})
    loop.note_finished_turn(2)
    saved = loop.saved(LoopStep(3, totals, 0.5))
    other = LoopState({"a": {}})
    other.resume(saved, 4)
    assert other.owed == (LoopStep(3, totals, 0.5),)
    assert other.turns == 3
    assert LoopState().saved(LoopStep(3, totals, 0.5)) is None
