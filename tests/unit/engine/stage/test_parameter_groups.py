"""Optimizers that leave out empty parameter groups, and schedulers with a value for each group."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from tests.depth import by_depth, nightly_rows
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.test_optimizer import fresh
from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.engine.stage.optimizer import NamedParameters, StageOptimizer
from varuna.engine.stage.parameter_groups import complete, whole_groups

STEPS = 4


def filtered(named: NamedParameters) -> Optimizer:
    """Biases first; groups without parameters are left out, as many scripts do."""
    biases = [p for name, p in named if name.endswith("bias")]
    deep = [p for name, p in named if name.startswith("layers.") and not name.endswith("bias")]
    rest = [p for name, p in named if not name.startswith("layers.")]
    groups: list[dict[str, Any]] = [
        {"params": biases, "lr": 1e-3, "weight_decay": 0.0},
        {"params": deep, "lr": 2e-3},
        {"params": rest, "lr": 3e-3},
    ]
    return AdamW([group for group in groups if group["params"]])


def one_cycle(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-3, 5e-3], total_steps=STEPS + 1)


def by_place(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    """Built from whatever groups there are: with one missing, the others would get each other's factors."""

    def factor(place: int, step: int) -> float:
        return 0.5**place / (1 + step)

    return lr_scheduler.LambdaLR(optimizer, [partial(factor, n) for n in range(len(optimizer.param_groups))])


@pytest.mark.parametrize(
    ("schedule", "offload"),
    [
        (one_cycle, False),
        *nightly_rows((by_place, False), (one_cycle, True), (by_place, True)),
    ],
)
def test_a_scheduler_finds_the_groups_of_the_whole_model_on_a_stage_with_one_of_them(
    schedule: Callable[[Optimizer], lr_scheduler.LRScheduler], offload: bool
) -> None:
    def cut(plan: Plan) -> Plan:
        return plan.with_each_pipeline(bounds=(*(0, 1, plan.sections - 1)[: plan.stages], plan.sections))

    setup = Setup(optimizer=filtered, scheduler=schedule, adjusted=cut, offload=offload)
    steps = by_depth(2, STEPS)
    alone = setup.losses(1, 1, steps)
    assert worst(alone, reference(setup, steps)) < 1e-5
    assert setup.losses(3, 1, steps) == alone
    first = setup.finished[0].current
    assert first is not None
    assert list(first.stage.parameters) == ["embed.weight"]


def test_empty_groups_take_their_places_and_options() -> None:
    named = fresh()

    def factory(given: NamedParameters) -> Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in given if "." not in n], "lr": 0.1, "tag": "first"},
            {"params": [p for n, p in given if n.endswith("weight")], "lr": 0.2},
            {"params": [p for n, p in given if n.endswith("bias")], "lr": 0.3},
        ]
        return SGD([group for group in groups if group["params"]], momentum=0.9)

    whole = whole_groups(factory, {name: tuple(p.shape) for name, p in named})
    some = [pair for pair in named if pair[0] == "a.bias"]
    optimizer = factory(some)
    complete(optimizer, some, whole)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(0, 0.1), (0, 0.2), (1, 0.3)]
    assert optimizer.param_groups[0]["tag"] == "first"
    before = list(optimizer.param_groups)
    complete(optimizer, some, whole)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in before]
    astray = SGD([{"params": [named[1][1], named[0][1]]}], lr=0.1)  # a weight and a bias in one group
    complete(astray, named, whole)
    assert len(astray.param_groups) == 1


def test_where_the_groups_are_not_known_the_message_says_to_keep_empty_ones() -> None:
    def values(given: NamedParameters) -> Optimizer:
        return SGD([p for _, p in given], lr=float(given[0][1].detach().abs().max()))

    assert whole_groups(values, {"a": (2,)}) == ()
    with pytest.raises(
        UsageError, match=r"with 1 parameter groups: .*3.*keep groups in optimizer= that are empty on a stage"
    ):
        StageOptimizer(values, one_cycle, fresh(), {}, 0)
