"""A built optimizer is copied for each stage, with all it has but the parameters of others; or refused in words."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from tests.unit.engine.stage.optimizers import Attributes, CountsInGroup, Lookahead, Whitening
from varuna import UsageError
from varuna.job.given_optimizer import OptimizerLike


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Checked(Optimizer):
    """Groups of two kinds, whose keys its constructor checks, and changes (Muon with an Adam beside it)."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            assert set(group) == {"params", "is_matrix"}
            group["params"] = sorted(group["params"], key=lambda p: p.numel(), reverse=True)
            group["rate"] = 0.1 if group["is_matrix"] else 0.01
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["rate"])


class Holds(Optimizer):
    """Refers to parameters in every way that it may: the model, lists, tables, functions of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.model, self.order = model, list(model.parameters())[::-1]
        self.factors: dict[Any, float] = {p: 1.0 + number for number, p in enumerate(self.order)}
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.first, self.apply = weakref.ref(self.order[0]), partial(self.move, factor=-1.0)

    def move(self, p: Any, factor: float) -> None:
        p.add_(p.grad, alpha=factor * self.factors[p] * (3.0 if p is self.first() else 1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = dict(self.model.named_parameters())
        for p in self.order:
            if p.grad is not None:
                assert own[self.names[id(p)]] is p
                self.apply(p)


def bounded(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.1, 0.1)


def hooked(model: nn.Module) -> Optimizer:
    found = SGD(model.parameters(), lr=0.1)
    found.register_step_post_hook(bounded)
    return found


def scheduled(model: nn.Module) -> Optimizer:
    found = AdamW(model.named_parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(found, lambda _: 0.5)
    return found


BUILT: dict[str, Callable[[nn.Module], Optimizer]] = {
    "an attribute that is no option": lambda m: Attributes(m.parameters(), m, decoupled=True),
    "groups that a constructor checks": lambda m: Checked(
        [
            {"params": [p for p in m.parameters() if (p.dim() == 2) == matrix], "is_matrix": matrix}
            for matrix in (True, False)
        ]
    ),
    "the model and its parameters": Holds,
    "a wrapper": lambda m: Lookahead(CountsInGroup(m.parameters())),
    "a hook over its own groups": hooked,
    "a schedule of the script's": scheduled,
    "state from its constructor": lambda m: Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "lists of tensors": lambda m: Whitening(m.parameters()),
}


def train(optimizer: Optimizer, named: list[tuple[str, nn.Parameter]], steps: int = 4) -> dict[str, Tensor]:
    for step in range(steps):
        for name, parameter in named:
            generator = torch.Generator().manual_seed(100 * step + sum(map(ord, name)))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("build", BUILT.values(), ids=BUILT.keys())
def test_copies_over_the_parts_of_a_model_train_as_the_scripts_own_optimizer(
    build: Callable[[nn.Module], Optimizer],
) -> None:
    model, part = net(), net()
    whole = build(model)
    factory: Any = OptimizerLike(whole, list(model.named_parameters()))
    named = list(part.named_parameters())
    found = {**train(factory(named[:3]), named[:3]), **train(factory(named[3:]), named[3:])}
    assert not whole.state or all(float(entries["step"]) == 0 for entries in whole.state.values())
    expected = train(whole, list(model.named_parameters()))
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_a_scheduler_finds_the_rates_from_before_the_scripts_own() -> None:
    model = net()
    whole, named = scheduled(model), list(model.named_parameters())
    rates = [
        OptimizerLike(whole, named, is_scheduled=is_scheduled)(named).param_groups[0] for is_scheduled in (False, True)
    ]
    assert [group["lr"] for group in rates] == [0.05, 0.1]
    assert "initial_lr" not in rates[1]


def closes_over(model: nn.Module) -> Optimizer:
    found = SGD(model.parameters(), lr=0.1)

    def counts(*_: object) -> None:
        getattr(model, "1").running_mean.zero_()

    found.register_step_pre_hook(counts)
    return found


class Balancing:
    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts

    def __call__(self, *_: object) -> None:
        """Would change the script's own modules."""


def bound(model: nn.Module) -> Optimizer:
    found = SGD(model.parameters(), lr=0.1)
    found.register_step_pre_hook(Balancing([model[2]]))  # type: ignore[index]
    return found


def patched(model: nn.Module) -> Optimizer:
    found, step = SGD(model.parameters(), lr=0.1), torch.optim.SGD.step
    found.step = lambda *_: step(found)  # type: ignore[method-assign]
    return found


def arguments(model: nn.Module) -> Optimizer:
    found = SGD(model.parameters(), lr=0.1)
    found.register_step_post_hook(partial(lambda bias, *_: bias.data.zero_(), list(model.parameters())[1]))
    return found


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (closes_over, r"a step_pre_hook, counts at .*test_given_optimizer.py:\d+, which uses the model \(model\)"),
        (bound, r"a step_pre_hook, .* which uses the model \(parts\[0\]\)"),
        (patched, r"attribute step, .* which uses the optimizer \(found\)"),
        (arguments, r"a step_post_hook, .* which uses a parameter \(argument 0\)"),
    ],
)
def test_code_that_knows_the_scripts_own_objects_is_refused_by_name(
    build: Callable[[nn.Module], Optimizer], text: str
) -> None:
    model = net()
    with pytest.raises(UsageError, match=text):
        OptimizerLike(build(model), list(model.named_parameters()))
