"""Any plan gives the losses of one process."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import (
    Dropping,
    Setup,
    SmallLanguage,
    Tokens,
    dropping,
    reference,
    single_threaded,
    tiny_gpt2,
    tiny_llama,
    worst,
)
from varuna.core.plan import Pipelines, Plan
from varuna.engine.stage.optimizer import NamedParameters
from varuna.schedule.actions import Kind

pytestmark = pytest.mark.usefixtures("one_thread")
GRIDS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3), (1, 4)]
LONG = [(4, 1), (2, 2)]
"""What adds up over many steps does so in these."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def test_every_plan_matches_a_plain_eager_loop_for_up_to_20_steps() -> None:
    setup = Setup()
    expected = reference(setup, steps=20)
    for stages, replicas in GRIDS:
        steps = 20 if (stages, replicas) in LONG else 5
        assert worst(setup.losses(stages, replicas, steps), expected[:steps]) < 1e-5, (stages, replicas)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_transformers_match_the_eager_loop(build: Callable[[], nn.Module]) -> None:
    setup = Setup(build=build)  # learnt positions and a tied head; rotary buffers
    expected = reference(setup, steps=3)
    flat = setup.losses(1, 1, steps=3)
    assert worst(flat, expected) < 1e-5
    assert setup.losses(3, 1, steps=3) == flat
    assert worst(setup.losses(2, 2, steps=3), expected) < 1e-5


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_depth_does_not_change_a_bit(replicas: int) -> None:
    setup = Setup(build=dropping, dataset=Tokens(padded=True))
    flat = setup.losses(1, replicas, steps=3)
    weights = setup.parameters()
    for stages in (2, 3):
        assert setup.losses(stages, replicas, steps=3) == flat, stages
        deep = setup.parameters()
        assert deep.keys() == weights.keys()
        assert all(torch.equal(deep[name], weights[name]) for name in weights), stages


def dealt(*speeds: float) -> Callable[[Plan], Plan]:
    return lambda plan: plan.model_copy(update={"speeds": speeds})


def test_replicas_of_different_speed_train_as_one_process() -> None:
    job: dict[str, Any] = {"build": Dropping, "dataset": Tokens(padded=True), "global_batch": 16}
    flat = Setup(**job).losses(1, 1, steps=4)
    unequal = Setup(**job, adjusted=dealt(1.0, 0.5))  # six micro-batches and two, whatever the depth
    found = [unequal.losses(stages, 2, steps=4) for stages in (1, 2, 3)]
    assert worst(found[0], flat) < 1e-5
    assert found[1] == found[0]
    assert found[2] == found[0]
    for share, offload in ((True, False), (False, True), (True, True)):
        setup = Setup(**job, share=share, offload=offload, adjusted=dealt(1.0, 0.7, 0.1))
        assert worst(setup.losses(2, 3, steps=4), flat) < 1e-5, (share, offload)


def mixed(*depths: int, paces: tuple[float, ...] = ()) -> Callable[[Plan], Plan]:
    """Pipelines of these depths, each cut evenly."""

    def adjusted(plan: Plan) -> Plan:
        def even(stages: int) -> dict[str, Any]:
            starts = tuple(plan.sections * stage // stages for stage in range(stages))
            return {"starts": starts, "stash_limits": tuple(3 * (stages - stage) for stage in range(stages))}

        more = tuple(
            Pipelines(replicas=1, pace=pace, **even(stages))
            for stages, pace in zip(depths[1:], paces or (1.0,) * len(depths), strict=False)
        )
        first = {"stages": depths[0], "replicas": len(depths), "kept": (), "stash_on_device": (), **even(depths[0])}
        return Plan.model_validate({**dict(plan), **first, "more": more})

    return adjusted


def mixed_losses(setup: Setup, *depths: int, steps: int = 4) -> list[tuple[float, float]]:
    return setup.losses(depths[0], len(depths), steps, size=sum(depths))


def test_pipelines_of_different_depths_train_as_one_process() -> None:
    job: dict[str, Any] = {"build": Dropping, "dataset": Tokens(padded=True), "global_batch": 16}
    flat = Setup(**job).losses(1, 1, steps=4)
    for depths in ((3, 2), (2, 1), (1, 3), (3, 1, 2)):
        assert worst(mixed_losses(Setup(**job, adjusted=mixed(*depths)), *depths), flat) < 1e-5, depths


def test_the_depths_of_two_pipelines_do_not_change_a_bit() -> None:
    job: dict[str, Any] = {"build": Dropping, "dataset": Tokens(padded=True), "global_batch": 16}
    equal = Setup(**job)
    losses = equal.losses(1, 2, steps=3)
    weights = equal.parameters()
    for depths in ((2, 1), (3, 2)):  # dealt like equal ones
        setup = Setup(**job, adjusted=mixed(*depths))
        assert mixed_losses(setup, *depths, steps=3) == losses, depths
        assert all(torch.equal(value, weights[name]) for name, value in setup.parameters().items()), depths


def test_dropout_does_not_depend_on_the_number_of_replicas() -> None:
    setup = Setup(build=Dropping)
    flat = setup.losses(1, 1)
    assert worst(setup.losses(1, 4), flat) < 1e-5
    assert flat != Setup().losses(1, 1)


@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "varuna-strict", "adaptive"])
def test_strict_orders_train_as_the_opportunistic_one(policy: str) -> None:
    setup = Setup(build=Dropping, global_batch=12)
    expected = setup.losses(3, 1)
    found = Setup(build=Dropping, global_batch=12, policy=policy).losses(3, 1)
    if policy == "gpipe":  # backwards in another order add up in another order
        assert worst(found, expected) < 1e-5
    else:
        assert found == expected


def sections_by_stage(plan: Plan) -> list[int]:
    return [len(plan.first_cut.sections_of(stage)) for stage in range(plan.stages)]


@pytest.mark.parametrize("split_last", [0, 2, 6])
@pytest.mark.parametrize("keep", ["none", "one", "all but one", "all"])
def test_split_backwards_and_kept_sections_do_not_change_a_bit(split_last: int, keep: str) -> None:
    def adjusted(plan: Plan) -> Plan:
        counts = sections_by_stage(plan)
        kept = {"none": (), "one": [1] * 3, "all but one": [max(0, n - 1) for n in counts], "all": counts}[keep]
        return plan.model_copy(update={"kept": tuple(kept), "split_last": split_last, "stash_limits": (4, 3, 2)})

    setup = Setup(build=Dropping, dataset=Tokens(padded=True), global_batch=12, policy="adaptive", adjusted=adjusted)
    alone = Setup(build=Dropping, dataset=Tokens(padded=True), global_batch=12)
    assert setup.losses(3, 1, steps=2) == alone.losses(1, 1, steps=2)
    expected, found = alone.parameters(), setup.parameters()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    kinds = [set() if times is None else {took.action.kind for took in times.actions} for times in setup.times()]
    assert all((Kind.INPUT in seen) == (Kind.WEIGHT in seen) == bool(split_last) for seen in kinds[1:])
    # A stage whose gradient has come when its F is through needs no R: one of the two that wait for later ones does.
    assert (Kind.RECOMPUTE in kinds[0] | kinds[1]) == (keep != "all")


def test_gpipe_and_1f1b_may_keep_everything() -> None:
    def all_kept(plan: Plan) -> Plan:
        return plan.model_copy(update={"kept": tuple(sections_by_stage(plan))})

    for policy in ("gpipe", "1f1b"):
        setup = Setup(build=Dropping, global_batch=12, policy=policy)
        expected = setup.losses(3, 1, steps=2)
        setup.adjusted = all_kept
        assert setup.losses(3, 1, steps=2) == expected
        for times in setup.times():
            assert times is not None
            assert not times.seconds_of(Kind.RECOMPUTE)


def test_a_fused_optimizer_is_the_same_in_any_plan() -> None:
    def fused(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3, fused=True)

    setup = Setup(optimizer=fused)
    expected = setup.losses(1, 1)
    assert setup.losses(3, 1) == expected
    assert Setup(optimizer=fused, offload=True).losses(2, 1) == expected


def test_padded_batches_equal_the_whole_batch() -> None:
    setup = Setup(dataset=Tokens(padded=True), micro_batch=1)
    assert worst(setup.losses(2, 2), reference(setup)) < 1e-5


def test_uneven_shares_and_a_short_last_micro_batch() -> None:
    setup = Setup(global_batch=9, micro_batch=2)  # 5 micro-batches, the last of one example, over 2 and 3 replicas
    expected = reference(setup)
    assert worst(setup.losses(1, 2), expected) < 1e-5
    assert worst(setup.losses(2, 3), expected) < 1e-5


def test_a_micro_batch_without_targets_counts_nothing() -> None:
    class Empty(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            sample = super().__getitem__(index)
            if index % 3 == 0:
                sample["labels"] = torch.full_like(sample["labels"], -100)
            return sample

    setup = Setup(dataset=Empty(), micro_batch=1)
    assert worst(setup.losses(2, 2), reference(setup)) < 1e-5


def test_sgd_with_a_schedule_and_without_clipping() -> None:
    setup = Setup(
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        clip=None,
    )
    expected = reference(setup, steps=6)
    assert worst(setup.losses(2, 2, steps=6), expected) < 1e-5
    rates = [each.totals.lr for each in setup.run(2, 1, steps=3)[1]]
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_parameter_groups_by_the_models_own_names() -> None:
    def by_name(named: NamedParameters) -> torch.optim.Optimizer:
        decayed = [p for name, p in named if name.endswith("weight")]
        rest = [p for name, p in named if not name.endswith("weight")]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])

    setup = Setup(optimizer=by_name)
    assert worst(setup.losses(3, 1), reference(setup)) < 1e-5
    assert "layers.0.weight" in setup.parameters()


def test_frozen_parameters_stay_and_a_stage_without_trainable_ones_builds_no_optimizer() -> None:
    def frozen() -> nn.Module:
        model = SmallLanguage()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name)
        return model

    def trained_only(named: NamedParameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-3)

    setup = Setup(build=frozen, optimizer=trained_only)
    assert worst(setup.losses(3, 1), reference(setup)) < 1e-5
    assert [each.totals.lr for each in setup.run(3, 1)[0]] == [1e-3] * 4


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


def test_a_users_weight_replaces_the_count() -> None:
    setup = Setup(dataset=Tokens(padded=True), weight=lambda batch: (batch["labels"] != -100).sum())
    assert worst(setup.losses(2, 2), reference(setup)) < 1e-5
