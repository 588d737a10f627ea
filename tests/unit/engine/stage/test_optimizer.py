"""An optimizer built anew goes on as if nothing had happened."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, lr_scheduler

from tests.unit.engine.stage.optimizers import KINDS
from varuna.checkpoint.io.section_state import SectionState, from_bytes, to_bytes
from varuna.core.errors import UsageError
from varuna.engine.stage.optimizer import NamedParameters, StageOptimizer

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "scale": ()}


def fresh() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in SHAPES.items()]


def unseen(written: object) -> None:
    """Nobody else computes with the parameters."""


def give_gradients(named: NamedParameters, step: int) -> None:
    for number, (_, parameter) in enumerate(named):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(optimizer: StageOptimizer, named: NamedParameters, steps: range) -> list[float | None]:
    rates = []
    for step in steps:
        rates.append(optimizer.lr)
        give_gradients(named, step)
        optimizer.update(unseen)
        optimizer.advance()
    return rates


def moved(optimizer: StageOptimizer, named: NamedParameters) -> tuple[list[tuple[str, nn.Parameter]], dict[str, Any]]:
    """Parameters and optimizer state as another worker gets them: as bytes, by name, in another order."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in named:
        tensors[f"p/{name}"] = parameter.detach()
        found, rest = optimizer.state_of(name)
        tensors.update({f"o/{name}/{key}": value for key, value in found.items()})
        scalars.update({f"o/{name}/{key}": value for key, value in rest.items()})
    there = from_bytes(to_bytes(SectionState(0, tensors, scalars)))
    state: dict[str, dict[str, Any]] = {}
    for path, value in (*there.tensors.items(), *there.scalars.items()):
        if path.startswith("o/"):
            name, key = path.removeprefix("o/").rsplit("/", 1)
            state.setdefault(name, {})[key] = value
    return [(name, nn.Parameter(there.tensors[f"p/{name}"])) for name, _ in reversed(named)], state


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[Optimizer]:
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.1), AdamW(others, lr=0.01)]


def hugging_faces(parameters: list[nn.Parameter]) -> Optimizer:
    from transformers import Adafactor

    found: Optimizer = Adafactor(parameters)  # type: ignore[no-untyped-call]
    return found


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer | list[Optimizer]]] = {
    "Muon and AdamW": muon_and_adamw,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adafactor of transformers": hugging_faces,
    "AdamW": lambda p: AdamW(p, lr=0.1, weight_decay=0.1),
    "AMSGrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: SGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


OPTIMIZERS |= {kind: lambda p, make=make: make([(str(each.dim()), each) for each in p]) for kind, make in KINDS.items()}  # type: ignore[misc]


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_state_by_name_survives_a_rebuild_bit_for_bit(
    build: Callable[[list[nn.Parameter]], Optimizer | list[Optimizer]],
) -> None:
    def factory(named: NamedParameters) -> Optimizer | list[Optimizer]:
        return build([parameter for _, parameter in named])

    named = fresh()
    first = StageOptimizer(factory, None, named, {}, 0)
    train(first, named, range(3))
    there, state = moved(first, named)
    second = StageOptimizer(factory, None, there, state, 3)
    give_gradients(named, 7)
    first.update(unseen)
    for (_, parameter), (_, mine) in zip(there, reversed(named), strict=True):
        parameter.grad = mine.grad
    second.update(unseen)
    assert all(torch.equal(value, dict(there)[name]) for name, value in named)
    for name, _ in named:
        (one, one_rest), (other, other_rest) = first.state_of(name), second.state_of(name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert one_rest == other_rest


def test_several_optimizers_do_what_each_does_alone() -> None:
    def factory(named: NamedParameters) -> list[Optimizer]:
        return muon_and_adamw([p for _, p in named])

    def halving(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    named, alone = fresh(), fresh()
    optimizer = StageOptimizer(factory, halving, named, {}, 0)
    parts = muon_and_adamw([p for _, p in alone])
    schedulers = [halving(part) for part in parts]
    for step in range(4):
        train(optimizer, named, range(step, step + 1))
        give_gradients(alone, step)
        for part in parts:
            part.step()
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(named, alone, strict=True))


@pytest.mark.parametrize("kind", [muon_and_adamw, *KINDS.values()], ids=lambda kind: kind.__name__)
def test_a_tentative_step_is_undone_bit_for_bit(kind: Any) -> None:
    named = fresh()
    build: Any = kind if kind is not muon_and_adamw else lambda n: muon_and_adamw([p for _, p in n])
    optimizer = StageOptimizer(build, None, named, {}, 0)
    train(optimizer, named, range(2))
    before = [p.detach().clone() for _, p in named], {name: str(optimizer.state_of(name)) for name, _ in named}
    restore = optimizer.copies()
    give_gradients(named, 2)
    optimizer.update(unseen)
    restore()
    after = [p.detach().clone() for _, p in named], {name: str(optimizer.state_of(name)) for name, _ in named}
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1] == after[1]
    train(optimizer, named, range(2, 3))
    assert str(optimizer.state_of("scale")) != before[1]["scale"]


def test_two_optimizers_over_one_parameter_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"two optimizers over a\.bias"):
        StageOptimizer(lambda n: [SGD([p for _, p in n]), SGD([n[1][1]])], None, fresh(), {}, 0)
    with pytest.raises(UsageError, match="empty list"):
        StageOptimizer(lambda n: [], None, fresh(), {}, 0)


def test_adamw_counts_its_steps_across_a_rebuild() -> None:
    named = fresh()
    optimizer = StageOptimizer(lambda n: AdamW([p for _, p in n]), None, named, {}, 0)
    train(optimizer, named, range(3))
    there, state = moved(optimizer, named)
    again = StageOptimizer(lambda n: AdamW([p for _, p in n]), None, there, state, 3)
    train(again, there, range(3, 5))
    assert again.state_of("scale")[0]["step"].item() == 5


def test_state_of_parameters_that_are_elsewhere_is_ignored_and_missing_state_starts_empty() -> None:
    named = fresh()[:1]
    state = {"gone": {"exp_avg": torch.zeros(1)}}
    optimizer = StageOptimizer(lambda n: AdamW([p for _, p in n]), None, named, state, 0)
    assert optimizer.state_of("gone") == ({}, {})
    assert optimizer.state_of("a.weight") == ({}, {})
    train(optimizer, named, range(1))


def sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[4])


def warm_up(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    from transformers import get_cosine_schedule_with_warmup

    built: lr_scheduler.LRScheduler = get_cosine_schedule_with_warmup(optimizer, 3, 12)
    return built


SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=30),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": sequential,
    "transformers": warm_up,
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 4, 11], gamma=0.5),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("done", [0, 1, 4, 13])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_replayed_schedule_equals_an_undisturbed_one(
    schedule: Callable[[Optimizer], lr_scheduler.LRScheduler], done: int
) -> None:
    built: list[Optimizer] = []

    def factory(named: NamedParameters) -> Optimizer:
        slow, fast = [p for _, p in named[:2]], [p for _, p in named[2:]]
        built.append(SGD([{"params": slow, "lr": 0.01}, {"params": fast, "lr": 0.2}], momentum=0.9))
        return built[-1]

    named, again = fresh(), fresh()
    undisturbed = StageOptimizer(factory, schedule, named, {}, 0)
    train(undisturbed, named, range(done))
    replayed = StageOptimizer(factory, schedule, again, {}, done)
    for step in range(done, done + 8):
        for one, other in zip(built[0].param_groups, built[1].param_groups, strict=True):
            assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
        assert train(undisturbed, named, range(step, step + 1)) == train(replayed, again, range(step, step + 1))


def test_something_else_than_a_schedule_is_refused() -> None:
    factory: Any = lambda optimizer: optimizer  # noqa: E731
    with pytest.raises(UsageError, match="but returned SGD"):
        StageOptimizer(lambda n: SGD([p for _, p in n]), factory, fresh(), {}, 0)


def test_an_optimizer_over_a_model_of_the_users_own_is_refused() -> None:
    other = fresh()
    with pytest.raises(UsageError, match="parameters that it was not given"):
        StageOptimizer(lambda n: SGD([*(p for _, p in n), other[0][1]]), None, fresh(), {}, 0)


@pytest.mark.parametrize("wrong", [None, nn.Linear(2, 2), "AdamW"])
def test_something_else_than_an_optimizer_is_refused_with_the_line_to_write(wrong: object) -> None:
    factory: Any = lambda named: wrong  # noqa: E731
    with pytest.raises(
        UsageError,
        match=rf"or a list of them, but returned {type(wrong).__name__}\. Write optimizer=lambda named: torch",
    ):
        StageOptimizer(factory, None, fresh(), {}, 0)


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LBFGS, whose step\(\) calls a closure"):
        StageOptimizer(lambda n: LBFGS([p for _, p in n]), None, fresh(), {}, 0)


def test_a_stage_without_trainable_parameters_calls_no_factory() -> None:
    refuse: Any = lambda _: pytest.fail("called")  # noqa: E731
    optimizer = StageOptimizer(refuse, refuse, [], {}, 5)
    optimizer.update(unseen)
    optimizer.advance()
    assert optimizer.lr is None
    assert optimizer.state_of("anything") == ({}, {})
