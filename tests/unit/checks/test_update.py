"""The check of the update refuses what several stages or a move would change, and is silent about the rest."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

import varuna
from tests.unit.engine.models import SmallLanguage, Tokens
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.optimizers import KINDS, Noisy, OverAll, values
from varuna.checks.update import UpdateCheck
from varuna.core.errors import UsageError
from varuna.testing import run
from varuna.trainer import Trainer


def sgd(named: Any) -> Optimizer:
    return SGD(values(named), lr=0.1, momentum=0.9)


def check(optimizer: Any = sgd, before_step: Any = None, scheduler: Any = None) -> UpdateCheck:
    return UpdateCheck(Setup().model, optimizer, scheduler, before_step)


def hugging_faces(named: Any) -> Optimizer:
    from transformers import Adafactor

    found: Optimizer = Adafactor(values(named), lr=1e-2, relative_step=False)  # type: ignore[no-untyped-call]
    return found


def noise(named: Any) -> None:
    for _, p in named:
        p.grad.add_(torch.randn_like(p.grad))


def told(named: Any) -> None:
    """Looks at everything, and changes nothing by it."""
    total = sum(float(p.grad.norm()) for _, p in named)
    assert total >= 0 or total != total


def shared_norm(named: Any) -> None:
    squares = sum(p.grad.square().sum() for _, p in named if varuna.owned(p))
    norm = varuna.all_reduce_shared(torch.as_tensor(squares)).sqrt()
    for _, p in named:
        p.grad.div_(norm + 1.0)


def own_clip(named: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for _, p in named], 1e3)


def halving(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


SILENT: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": kind, "scheduler": halving if "rate" not in name else None} for name, kind in KINDS.items()},
    "noise in the optimizer": {"optimizer": lambda named: Noisy(values(named), lr=0.1)},
    "noise": {"before_step": noise},
    "logging": {"before_step": told},
    "a norm that stages share": {"before_step": shared_norm},
    "Adafactor": {"optimizer": hugging_faces},
}


@pytest.mark.parametrize("given", SILENT.values(), ids=SILENT.keys())
def test_updates_that_every_plan_makes_alike_pass(given: dict[str, Any]) -> None:
    found = check(**given)
    found.of_moves()
    found.of_stages()


class WithSpare(SmallLanguage):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("given", [{}, {"before_step": noise}, SILENT["noise in the optimizer"]])
def test_parameters_that_the_loss_does_not_use_are_no_matter_of_the_update(given: dict[str, Any]) -> None:
    found = UpdateCheck(**{"model": Setup(build=WithSpare).model, "optimizer": sgd, **given})
    found.of_names()
    found.of_zero_grad()
    found.of_moves()
    found.of_stages()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"optimizer": lambda named: OverAll(values(named))},
            "^the optimizer at .* computes something over parameters",
        ),
        ({"optimizer": lambda named: OverAll(values(named), d=1e-9)}, r"options\['d'\], .* would become other"),
        ({"before_step": own_clip}, r"^before_step= .*test_update\.py:\d+ .*pass clip_grad_norm= to varuna.Trainer"),
        (
            {"before_step": lambda named: named[0][1].grad.add_(sum(p.grad.sum() for _, p in named))},
            "would become other",
        ),
    ],
)
def test_what_computes_over_all_parameters_is_refused_before_several_stages(given: dict[str, Any], text: str) -> None:
    found = check(**given)
    found.of_moves()
    with pytest.raises(UsageError, match=text):
        found.of_stages()


class Remembers(SGD):
    """Keeps momentum in a table of its own."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.momenta: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.momenta[p] = self.momenta.get(p, 0) * 0.9 + p.grad
            p.sub_(self.momenta[p], alpha=0.1)


class OwnGenerator(Remembers):
    """Draws from a generator of its own."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__(parameters)
        self.generator = np.random.default_rng(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * float(self.generator.random()))


class Projector:
    """An object that no checkpoint can hold."""


class Projects(Remembers):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["projector"] = Projector()


class SlowWeights(Remembers):
    """Goes half the way back to slow weights every so many steps."""

    def __init__(self, parameters: list[Any], every: int) -> None:
        super().__init__(parameters)
        self.steps, self.every, self.slow = 0, every, {p: p.detach().clone() for p in parameters}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p, slow in self.slow.items():
            p.sub_(p.grad, alpha=0.1)
            if self.steps % self.every == 0:
                p.copy_(slow.lerp_(p, 0.5))


def hooked(named: Any) -> Optimizer:
    found, steps = SGD(values(named), lr=0.1), [0]

    def warm(optimizer: Optimizer, *_: object) -> None:
        steps[0] += 1
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(min(1.0, steps[0] / 4))

    found.register_step_pre_hook(warm)
    return found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (lambda named: Remembers(values(named)), "otherwise after a change of plan"),
        (lambda named: OwnGenerator(values(named)), "otherwise after a change of plan"),
        (hooked, "otherwise after a change of plan"),
        (lambda named: SlowWeights(values(named), 2), "otherwise after a change of plan"),
        (lambda named: SlowWeights(values(named), 5), "otherwise after a change of plan"),
        (lambda named: Projects(values(named)), r"a Projector in state\[parameter\]\['projector'\] \(of embed"),
    ],
)
def test_what_a_move_would_lose_is_refused(kind: Callable[[Any], Optimizer], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check(kind).of_moves()


class Counted:
    """Remembers how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, named: Any) -> None:
        self.calls += 1
        for _, parameter in named:
            parameter.grad.mul_(1 / self.calls)


def averaged() -> Callable[[Any], None]:
    averages: dict[str, Tensor] = {}

    def before_step(named: Any) -> None:
        for name, parameter in named:
            averages[name] = 0.5 * (averages.get(name, parameter.grad) + parameter.grad)
            parameter.grad = averages[name]

    return before_step


def noisy() -> Callable[[Any], None]:
    generator = torch.Generator().manual_seed(0)
    return lambda named: [p.grad.add_(torch.randn(p.shape, generator=generator)) for _, p in named]  # type: ignore


@pytest.mark.parametrize("before_step", [Counted(), averaged(), noisy()], ids=["counter", "averages", "generator"])
def test_what_before_step_remembers_is_refused_where_workers_come_and_go(before_step: Any) -> None:
    with pytest.raises(UsageError, match=r"^before_step= .*must not remember.*before_step\(named, step\)"):
        check(before_step=before_step).of_moves()


def test_before_step_may_be_told_the_step_and_keep_what_state_names() -> None:
    calls = {"n": 0}

    def by_step(named: Any, step: int) -> None:
        for _, parameter in named:
            parameter.grad.mul_(1 / (1 + step))

    def by_state(named: Any) -> None:
        calls["n"] += 1
        by_step(named, calls["n"] - 1)

    for found in (check(before_step=by_step), replace(check(before_step=by_state), kept=[calls])):
        found.of_moves()
        calls["n"] = 7  # the run goes on
        found.of_stages()


def test_an_optimizer_whose_zero_grad_keeps_gradients_is_refused() -> None:
    class Keeping(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.1)

    with pytest.raises(
        UsageError, match=r"zero_grad\(\) of the optimizer at .* leaves gradients of .*state\[parameter"
    ):
        check(optimizer=lambda named: Keeping(values(named), lr=0.1)).of_zero_grad()
    with pytest.raises(UsageError, match="leaves gradients of"):
        check(optimizer=lambda named: [sgd(named[:1]), Keeping(values(named[1:]), lr=0.1)]).of_zero_grad()
    check(optimizer=lambda named: [sgd(named[:1]), sgd(named[1:])]).of_zero_grad()


def test_an_optimizer_that_clears_gradients_in_its_step_needs_no_zero_grad() -> None:
    class Clearing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            super().zero_grad()

        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    check(optimizer=lambda named: Clearing(values(named), lr=0.1)).of_zero_grad()


def test_before_step_that_would_change_what_is_not_trained_is_refused() -> None:
    def follow(named: Any) -> None:
        known = dict(named)
        if "layers.0.weight" in known and "layers.1.weight" in known:
            known["layers.0.weight"].data.lerp_(known["layers.1.weight"].data, 0.5)

    def scaled(named: Any) -> None:
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def partly_frozen() -> torch.nn.Module:
        model = SmallLanguage()
        model.layers[0].weight.requires_grad_(False)
        return model

    model = Setup(build=partly_frozen).model
    with pytest.raises(UsageError, match=r"before_step= at .* changes layers\.0\.weight.*after_step="):
        UpdateCheck(model, sgd, before_step=follow).of_names()
    UpdateCheck(model, sgd, before_step=scaled).of_names()
    check(before_step=follow).of_names()


def test_a_schedule_that_remembers_its_calls_is_refused() -> None:
    calls: list[int] = []

    def rate(step: int) -> float:
        calls.append(step)
        return 1 / len(calls)

    with pytest.raises(UsageError, match=r"lr_scheduler= at .*other rates when it is built again"):
        check(scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)).of_moves()


def test_frozen_follows_from_name_and_step() -> None:
    drawn = random.Random(0)
    replace(check(), frozen=lambda name, step: random.Random(step).random() < 0.5).of_moves()
    for frozen in (lambda name, step: drawn.random() < 0.5, lambda name, step: random.random() < 0.5):
        with pytest.raises(UsageError, match=r"frozen= at .*another answer.*random\.Random\(step\)"):
            replace(check(), frozen=frozen).of_moves()


def test_what_after_step_remembers_is_refused_and_is_not_changed_by_trying() -> None:
    calls, kept = {"n": 0}, {"n": 0}

    def shrink(parameters: Any, buffers: Any) -> None:
        calls["n"] += 1
        for value in parameters.values():
            value.mul_(1 - 0.01 * calls["n"])

    def by_state(parameters: Any, buffers: Any) -> None:
        kept["n"] += 1
        parameters["embed.weight"].mul_(1 - 0.01 * kept["n"])

    def by_step(parameters: Any, buffers: Any, step: int) -> None:
        parameters["embed.weight"].mul_(1 - 0.01 * step)

    with pytest.raises(UsageError, match=r"after_step= at .*remembers something.*register_buffer"):
        after(shrink).of_moves()
    after(by_step).of_moves()
    replace(after(by_state), kept=[kept]).of_moves()
    assert (calls["n"], kept["n"]) == (0, 0)


def after(function: Any) -> UpdateCheck:
    return UpdateCheck(Setup(after_step=function).model, sgd, after_step=function)


seen: list[int] = []


def test_the_check_leaves_what_before_step_remembers_alone() -> None:
    count = 0

    def counts(named: Any) -> None:
        nonlocal count
        count += 1
        seen.append(count)

    found = check(before_step=counts)
    found.of_moves()
    found.of_stages()
    assert (count, seen) == (0, [])


def test_a_run_with_several_stages_is_refused_in_words_and_one_of_one_stage_runs() -> None:
    def script() -> None:
        make: Any = lambda named: OverAll(values(named))  # noqa: E731
        for _ in Trainer(SmallLanguage, Tokens(), make, 8, micro_batch=2).steps(2):
            pass

    with pytest.raises(UsageError, match=r"varuna run --stages 1"):
        run(script, workers=2, stages={2: 2})
    assert len(run(script, workers=2, stages={2: 1}).losses) == 2
