"""The tracer catches what crosses sections behind the framework's back, and is silent about the rest."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.partition import hidden
from tests.unit.partition.hidden import over
from varuna.checks.dependencies.tracer import Dependency, find_dependencies
from varuna.core.errors import WorkerError
from varuna.partition.initial.constructor import Initial, materialise


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@cache
def captured() -> tuple[Setup, Initial]:
    setup = Setup()
    return setup, materialise(setup.recipe, 0)


def traced(optimizer: Any = None, before_step: Any = None, scheduler: Any = None) -> list[Dependency]:
    setup, initial = captured()
    job = replace(
        setup.job(), optimizer=optimizer or over(torch.optim.AdamW), before_step=before_step, scheduler=scheduler
    )
    before = {name: value.clone() for name, value in initial.parameters.items()}
    found = find_dependencies(job, setup.recipe, initial, setup.source.micro_batch(range(2)).tensors)
    assert all(torch.equal(before[name], value) for name, value in initial.parameters.items())
    return found


def line_of(code: Callable[..., Any], text: str) -> str:
    code = inspect.unwrap(code)
    lines, first = inspect.getsourcelines(code)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(code)}:{first + number}"


SILENT = {
    "adamw": over(torch.optim.AdamW),
    "adamw foreach": over(torch.optim.AdamW, foreach=True),
    "adamw loop": over(torch.optim.AdamW, foreach=False),
    "adamw fused": over(torch.optim.AdamW, fused=True),
    "adamw fused amsgrad": over(torch.optim.AdamW, fused=True, amsgrad=True),
    "adam with a tensor lr": over(torch.optim.Adam, lr=torch.tensor(1e-3), foreach=False),
    "sgd momentum": over(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": over(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": over(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": over(torch.optim.Adagrad, lr=0.1),
    "rmsprop": over(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "rmsprop foreach": over(torch.optim.RMSprop, lr=0.1, foreach=True),
    "adafactor": over(torch.optim.Adafactor, lr=0.1),
    "adafactor foreach": over(torch.optim.Adafactor, lr=0.1, foreach=True),
    "radam": over(torch.optim.RAdam),
    "lamb that shares its norm": over(hidden.SharedLamb),
}


@pytest.mark.parametrize("name", SILENT)
def test_is_silent_on(name: str) -> None:
    assert traced(SILENT[name]) == []


def test_is_silent_on_adafactor_of_transformers() -> None:
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    assert traced(over(adafactor)) == []


@pytest.mark.parametrize(
    "before_step",
    [None, hidden.notes_each, hidden.overflow_shared, hidden.shares_an_item],
    ids=lambda code: getattr(code, "__name__", "none"),
)
def test_is_silent_on_sound_user_code(before_step: Any) -> None:
    assert traced(before_step=before_step, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)) == []


CAUGHT = [
    (hidden.clip_by_torch, "mixed", "clip_grad_norm_", "clip_grad_norm="),
    (hidden.clip_by_hand, "mixed", "torch.cat", "all_reduce_shared"),
    (hidden.overflow_by_scaler, "mixed", "unscale_", 'op="max"'),
    (hidden.adds_items, "number", ".item()", "all_reduce_shared"),
    (hidden.adds_floats, "number", "float(", "all_reduce_shared"),
    (hidden.sums_generator, "number", ".item()", "all_reduce_shared"),
    (hidden.copies_between_layers, "mixed", "copy_", "all_reduce_shared"),
    (hidden.branches, "effect", "isfinite", "all_reduce_shared"),
    (hidden.through_numpy, "effect", "def ", "all_reduce_shared"),
    (hidden.uses_a_global, "untagged", "add_", "outside the step"),
]


@pytest.mark.parametrize(("code", "kind", "line", "remedy"), CAUGHT, ids=[case[0].__name__ for case in CAUGHT])
def test_catches(code: Any, kind: str, line: str, remedy: str) -> None:
    (found,) = traced(before_step=code)
    assert (found.kind, found.where) == (kind, line_of(code, line))
    assert remedy in found.remedy
    assert found.names
    assert kind == "untagged" or len(found.sections) > 1


def test_catches_every_section_and_name_of_a_global_norm() -> None:
    (found,) = traced(before_step=hidden.clip_by_torch)
    model = captured()[0].model
    assert found.sections == tuple(sorted({model.owner_of(name) for name in model.trainable}))
    assert set(found.names) == model.trainable


def test_catches_the_global_norm_of_a_third_partys_lamb() -> None:
    (found,) = traced(over(hidden.Lamb))
    assert (found.kind, found.where) == ("mixed", line_of(hidden.Lamb.step, "squares +="))


def test_catches_an_optimizer_of_torch_at_the_line_that_builds_it() -> None:
    def flattened(named: Any) -> torch.optim.Optimizer:
        class Normed(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                torch.nn.utils.clip_grads_with_norm_(self.param_groups[0]["params"], 1.0, self.norm())

            def norm(self) -> torch.Tensor:
                grads = [hidden.grad(p) for p in self.param_groups[0]["params"]]
                return torch.nn.utils.get_total_norm(grads)

        return Normed([p for _, p in named], lr=0.1)

    (found,) = traced(flattened)
    assert found.where == line_of(flattened, "get_total_norm")


def test_catches_a_weight_that_is_shared_behind_the_frameworks_back() -> None:
    setup = Setup(build=hidden.shares_memory(SmallLanguage))
    found = find_dependencies(
        setup.job(), setup.recipe, materialise(setup.recipe, 0), setup.source.micro_batch(range(2)).tensors
    )
    (weight,) = [each for each in found if each.kind == "shared weight"]
    assert sorted(weight.names) == ["layers.0.weight", "layers.2.weight"]
    assert len(weight.sections) == 2
    assert "hidden.py:" in weight.where


def test_catches_hooks_that_add_up_during_the_backward() -> None:
    total = [torch.zeros(())]

    def add(parameter: torch.Tensor) -> None:
        total[0] = total[0] + hidden.grad(parameter).norm()

    def hooked(named: Any) -> torch.optim.Optimizer:
        for _, parameter in named:
            parameter.register_post_accumulate_grad_hook(add)
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    (found,) = traced(hooked)
    assert (found.kind, found.where) == ("mixed", line_of(add, "total[0] ="))


def test_a_failure_of_the_users_code_is_told_as_such() -> None:
    def failing(named: Any) -> None:
        raise ValueError("the learning rate is a string")

    with pytest.raises(WorkerError, match="the learning rate is a string"):
        traced(before_step=failing)
