"""Objects that a script has built train as in a plain loop, and cannot be used by mistake while they do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import varuna
from varuna import UsageError
from varuna.data import sample_index
from varuna.data.randomness import generator_lock
from varuna.job.built import as_functions
from varuna.testing import fail_at, run


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x))
        return logits


def points() -> list[tuple[Tensor, int]]:
    drawn = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return [(row, index % 4) for index, row in enumerate(drawn)]


def criterion() -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(label_smoothing=0.1)


def built(seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer and a scheduler, as any script makes them; all workers are threads of one process."""
    with generator_lock:
        torch.manual_seed(seed)
        model = Classifier()
    decayed = {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1}
    rest = {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02}
    optimizer = torch.optim.AdamW([decayed, rest], lr=0.01)
    schedules = [LinearLR(optimizer, 0.1, total_iters=3), OneCycleLR(optimizer, [0.05, 0.1], total_steps=20)]
    return model, optimizer, SequentialLR(optimizer, schedules, [3])


def plain(steps: int, batch: int) -> tuple[list[float], nn.Module]:
    """The same in plain PyTorch: losses, and the trained model."""
    model, optimizer, scheduler = built()
    found, data = [], points()
    for step in range(steps):
        rows = [data[sample_index(step * batch + i, size=len(data), seed=0)] for i in range(batch)]
        loss = criterion()(model(torch.stack([x for x, _ in rows])), torch.tensor([y for _, y in rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found, model


def trainer(seed: int = 3) -> tuple[varuna.Trainer, nn.Module, torch.optim.Optimizer]:
    model, optimizer, scheduler = built(seed)
    made = varuna.Trainer(
        model, points(), optimizer, global_batch=12, loss=criterion(), lr_scheduler=scheduler, device="cpu"
    )
    return made, model, optimizer


@pytest.mark.nightly
def test_stages_replicas_and_a_lost_worker_train_as_the_plain_loop_does() -> None:
    """After the loop the script's own model is the trained one, on every worker."""

    def script() -> Tensor:
        made, model, _ = trainer()
        for _ in made.steps(8):
            pass
        return model(torch.ones(1, 8)).detach()  # type: ignore[no-any-return]

    found = run(script, workers=4, stages={4: 2, 3: 3}, faults=[fail_at(rank=1, step=4)])
    expected, trained = plain(8, 12)
    assert found.plans == ("2x2", "3x1")
    assert found.losses == pytest.approx(expected, abs=2e-6)
    assert len(found.returned) == 3
    for output in found.returned.values():
        torch.testing.assert_close(output, trained(torch.ones(1, 8)).detach(), rtol=1e-4, atol=1e-5)


class CopiedByItsState(nn.Sequential):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        made = CopiedByItsState(*(nn.Linear(4, 4) for _ in self))
        made.load_state_dict(self.state_dict())
        return made


class PickledByItsState(nn.Sequential):
    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError(f"{len(state)} values of an older version")


class RefusesCopies(nn.Sequential):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise RuntimeError("there shall be one of these")


@pytest.mark.parametrize("kind", [CopiedByItsState, PickledByItsState, RefusesCopies])
@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: nn.Sequential(nn.Linear(4, 4), module)])
def test_a_class_that_copies_its_modules_in_its_own_way_trains_as_any_other(kind: Any, wrap: Any) -> None:
    def trained(kind: Any) -> float:
        with generator_lock:
            torch.manual_seed(3)
            model = wrap(kind(nn.Linear(4, 4), nn.Linear(4, 4)))
        given = varuna.Trainer(
            model,
            [{"input": row} for row in torch.randn(8, 4, generator=torch.Generator().manual_seed(1))],
            torch.optim.SGD(model.parameters(), lr=0.1),
            8,
            loss=lambda output, batch: (output - batch["input"]).pow(2).mean(),
            micro_batch=8,
            device="cpu",
        )
        for step in given.steps(2):
            loss = step.loss
        return loss

    assert trained(kind) == trained(nn.Sequential)


def test_using_what_was_handed_over_is_an_error_while_it_trains() -> None:
    made, model, optimizer = trainer()
    schedule = made._given.schedule
    assert schedule is not None
    x = torch.ones(1, 8)
    before = model(x)
    for step in made.steps(9):
        with pytest.raises(UsageError, match="no forward or backward pass of its own"):
            model(x)
        with pytest.raises(UsageError, match=r"trainer\.export\(path\) after the loop"):
            model.state_dict()
        with pytest.raises(UsageError, match=r"To resume, checkpoints="):
            optimizer.state_dict()
        with pytest.raises(UsageError, match=r"Leave scheduler\.step\(\) out"):
            schedule.step()
        with pytest.raises(UsageError, match=r"Leave optimizer\.step\(\)"):
            optimizer.step()
        if step.index == 1:
            break
    assert not torch.equal(model(x), before)


def test_workers_that_built_other_values_are_refused() -> None:
    seeds = iter(range(2))

    def script() -> None:
        for _ in trainer(next(seeds))[0].steps(1):
            pass

    with pytest.raises(varuna.VarunaError, match="initialisation"):
        run(script, workers=2, bound_s=20.0)


def other(scheduler: Any) -> dict[str, Any]:
    model, optimizer, _ = built()
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}


WRONG = [
    (lambda: {"model": Classifier, "optimizer": built()[1]}, "an AdamW that is built already, but model= builds"),
    (lambda: {"model": Classifier(), "optimizer": built()[1]}, "parameters that model= does not have"),
    (lambda: other(StepLR(built()[1], 3)), "a StepLR of another optimizer"),
    (lambda: {"model": nn.DataParallel(Classifier()), "optimizer": None}, "wrapped in DataParallel"),
    (
        lambda: {"model": torch.compile(Classifier(), backend="eager"), "optimizer": None},
        "Pass the module from before",
    ),
]


@pytest.mark.parametrize(("given", "text"), WRONG, ids=[text for _, text in WRONG])
def test_parts_that_do_not_belong_together_are_refused(given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        as_functions(**{"lr_scheduler": None, **given()})


def test_an_optimizer_that_another_training_has_used_is_refused() -> None:
    model, optimizer, _ = built()
    as_functions(model, optimizer, None)
    as_functions(model, optimizer, None).guard()
    with pytest.raises(UsageError, match=r"another varuna.Trainer has trained with.*Build a new one"):
        as_functions(model, optimizer, None)


def test_a_plateau_is_built_again_over_the_parameters_of_a_stage() -> None:
    model, optimizer, _ = built()
    given = as_functions(model, optimizer, ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    assert given.lr_scheduler is not None
    part: Any = given.optimizer(list(model.named_parameters())[:2])
    scheduler: Any = given.lr_scheduler(part)
    rates = [group["lr"] for group in part.param_groups]
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert [group["lr"] for group in part.param_groups] == [rate / 2 for rate in rates]
    assert isinstance(scheduler, ReduceLROnPlateau)


def test_a_loss_module_says_which_samples_it_cannot_compare() -> None:
    rows = [{"x": x, "target": torch.tensor(y)} for x, y in points()]
    model, optimizer, _ = built()
    made = varuna.Trainer(model, rows, optimizer, global_batch=4, loss=criterion(), device="cpu")
    with pytest.raises(UsageError, match=r"batch\['labels'\], but samples have x, target\. .*batch\['target'\]"):
        next(made.steps(1))
