"""A plan's choices besides P and D change no number: shares, orders, halves of backwards, what is kept."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.depth import by_depth, nightly
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens
from tests.unit.engine.optimizers import by_step, trained_only
from tests.unit.engine.plain import Curve, reference, worst
from tests.unit.engine.ranks import Setup, dealt
from tests.unit.testing.test_options import frozen
from varuna.core.plan import Plan
from varuna.engine.stage.optimizer import NamedParameters
from varuna.schedule.actions import Kind


@pytest.mark.nightly
@pytest.mark.parametrize("grid", [(4, 1), (2, 2)])
def test_nothing_adds_up_over_20_steps(grid: tuple[int, int]) -> None:
    setup = Setup()
    assert worst(setup.losses(*grid, steps=20), reference(setup, steps=20)) < 1e-5


@pytest.mark.nightly
def test_replicas_of_different_speed_train_as_one_process() -> None:
    job: dict[str, Any] = {"build": Dropping, "dataset": Tokens(padded=True), "global_batch": 16}
    steps = by_depth(2, 4)
    flat = Setup(**job).losses(1, 1, steps)
    unequal = Setup(**job, adjusted=dealt(1.0, 0.5))  # six micro-batches and two, whatever the depth
    found = [unequal.losses(stages, 2, steps) for stages in by_depth((1, 2), (1, 2, 3))]
    assert worst(found[0], flat) < 1e-5
    assert all(each == found[0] for each in found)
    for share, offload in by_depth(((True, True),), ((True, False), (False, True), (True, True))):
        setup = Setup(**job, share=share, offload=offload, adjusted=dealt(1.0, 0.7, 0.1))
        assert worst(setup.losses(2, 3, steps), flat) < 1e-5, (share, offload)


@cache
def opportunistic(steps: int) -> Curve:
    return Setup(build=Dropping, global_batch=12).losses(3, 1, steps)


@pytest.mark.parametrize("policy", ["gpipe", "adaptive", *nightly("1f1b", "varuna-strict")])
def test_strict_orders_train_as_the_opportunistic_one(policy: str) -> None:
    steps = by_depth(2, 4)
    found = Setup(build=Dropping, global_batch=12, policy=policy).losses(3, 1, steps)
    if policy == "gpipe":  # backwards in another order add up in another order
        assert worst(found, opportunistic(steps)) < 1e-5
    else:
        assert found == opportunistic(steps)


def sections_by_stage(plan: Plan) -> list[int]:
    return [len(plan.first.sections_of(stage)) for stage in range(plan.stages)]


FAST = {("one", 2)}


@pytest.mark.parametrize(
    ("keep", "split_last"),
    [
        pytest.param(keep, split, marks=() if (keep, split) in FAST else pytest.mark.nightly)
        for keep in ("none", "one", "all but one", "all")
        for split in (0, 2, 6)
    ],
)
def test_split_backwards_and_kept_sections_do_not_change_a_bit(keep: str, split_last: int) -> None:
    def adjusted(plan: Plan) -> Plan:
        counts = sections_by_stage(plan)
        kept = {"none": (), "one": [1] * 3, "all but one": [max(0, n - 1) for n in counts], "all": counts}[keep]
        empties = keep in ("one", "all but one")
        return plan.with_each_pipeline(kept=tuple(kept), split_last=split_last, empties=empties, stash_limits=(4, 3, 2))

    setup = Setup(build=Dropping, dataset=Tokens(padded=True), global_batch=12, policy="adaptive", adjusted=adjusted)
    alone = Setup(build=Dropping, dataset=Tokens(padded=True), global_batch=12)
    assert setup.losses(3, 1, steps=2) == alone.losses(1, 1, steps=2)
    expected, found = alone.parameters(), setup.parameters()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kinds = [set() if times is None else {Kind(took.kind) for took in times.actions} for times in setup.times()]
    assert all((Kind.INPUT in seen) == (Kind.WEIGHT in seen) == bool(split_last) for seen in kinds[1:])
    # A stage whose gradient has come when its F is through needs no R: one of the two that wait for later ones does.
    assert (Kind.RECOMPUTE in kinds[0] | kinds[1]) == (keep != "all")


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["1f1b", *nightly("gpipe")])
def test_gpipe_and_1f1b_may_keep_everything(policy: str) -> None:
    def all_kept(plan: Plan) -> Plan:
        return plan.with_each_pipeline(kept=tuple(sections_by_stage(plan)))

    setup = Setup(build=Dropping, global_batch=12, policy=policy)
    expected = setup.losses(3, 1, steps=2)
    setup.adjusted = all_kept
    assert setup.losses(3, 1, steps=2) == expected
    for times in setup.times():
        assert times is not None
        assert not times.seconds_of(Kind.RECOMPUTE)


def test_what_drops_out_is_drawn() -> None:
    assert Setup(build=Dropping).losses(1, 1, 1) != Setup(build=SmallLanguage).losses(1, 1, 1)


@pytest.mark.nightly
def test_every_rank_tells_the_learning_rate_though_it_has_nothing_to_train() -> None:
    setup = Setup(build=frozen, optimizer=trained_only, scheduler=by_step)
    ranks = setup.run(3, 1, steps=3)
    assert all([each.totals.lr for each in rank] == pytest.approx([1e-3, 5e-4, 1e-3 / 3]) for rank in ranks)
    assert "layers.0.weight" in setup.parameters()  # by the model's own name


def norm_of(gradient: Tensor | None) -> float:
    assert gradient is not None
    return float(gradient.norm())


def test_before_step_sees_reduced_clipped_gradients_of_every_parameter() -> None:
    seen: dict[str, float] = {}

    def look(named: NamedParameters) -> None:
        seen.update({name: norm_of(parameter.grad) for name, parameter in named})

    setup = Setup(before_step=look)
    setup.run(1, 1, steps=1)
    one = dict(seen)
    seen.clear()
    setup.run(2, 2, steps=1)
    assert seen.keys() == one.keys()
    assert sum(value**2 for value in one.values()) ** 0.5 == pytest.approx(1.0, rel=1e-4)
    assert all(seen[name] == pytest.approx(one[name], rel=1e-4) for name in one)


def test_metrics_are_summed_over_the_global_batch() -> None:
    def count(output: object, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "targets": (batch["labels"] != -100).sum(),
            "examples": torch.ones(batch["labels"].shape[0]).sum(),
        }

    setup = Setup(metrics=count, dataset=Tokens(padded=True))
    one, many = setup.run(1, 1)[0], setup.run(2, 2)[3]
    assert [each.totals.metrics for each in one] == [each.totals.metrics for each in many]
    assert all(each.totals.metrics["examples"] == 8 for each in one)
    assert [each.totals.metrics["targets"] for each in one] == [each.totals.weight for each in one]
