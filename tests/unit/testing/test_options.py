"""Option x model x plan: whatever a job asks for, any plan trains what a plain loop does, and P changes no bit.

A case is a job. Each runs as 1x1, 2x1, 1x2, 2x2 and as unlike pipelines. ``make nightly`` has more cases, plans, steps.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth, nightly
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, dropping, tiny_gpt2, tiny_llama
from tests.unit.engine.optimizers import (
    adafactor,
    adafactor_of_transformers,
    adagrad,
    by_step,
    fused,
    grouped,
    momentum,
    muon_and_adamw,
    remembering,
    trained_only,
    warm,
)  # fmt: skip
from tests.unit.engine.plain import same, shifted_targets, targets, train_plainly, worst
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.optimizers import KINDS
from tests.unit.engine.stage.test_batch_norm import setup as normalised
from tests.unit.engine.stage.test_parameter_groups import by_place, filtered, one_cycle
from tests.unit.engine.test_adapters import Adapted, in_bf16
from tests.unit.engine.test_complex import Spectral
from tests.unit.partition import odd_modules
from tests.unit.partition.hidden import SharedLamb, over
from tests.unit.testing import test_length_variants, test_terms
from tests.unit.testing.test_terms import Sentences
from varuna.engine.graphs.compiled import Compiler

STEPS = by_depth(2, 5)
DEEPER = by_depth((2,), (2, 3, 4))
WIDER = by_depth(((2, 2), (2, 1)), ((1, 1), (2, 2), (2, 1), (3, 3), (3, 2), (1, 3)))
"""Two pipelines, by their depths; where they are dealt the same micro-batches, they give the same bits."""
MORE = by_depth((), ((1, 1, 1), (2, 2, 2), (1, 1, 1, 1), (3, 1, 2)))


class Odd(Tokens):
    """Some micro-batches have no targets, and some samples few."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if index % 3 == 0:
            sample["labels"] = torch.full_like(sample["labels"], -100)
        return sample


class Padded(Tokens):
    """For the models of ``odd_modules``."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return odd_modules.sample(index)


def frozen() -> nn.Module:
    """Only one layer is trained: most stages have nothing to train."""
    model = SmallLanguage()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name)
    return model


def alternating(name: str, step: int) -> bool:
    """Every layer is left as it is in some steps, the tied embeddings in the first."""
    return (step + name.count("0") + 2 * name.count("1") + len(name.split(".")[0])) % 2 == 0


def replaced(named: list[tuple[str, nn.Parameter]]) -> None:
    """Parameters and gradients are other tensors than before, or there are none; embeddings are tied."""
    for name, parameter in named:
        parameter.data = 0.999 * parameter.data
        if parameter.grad is not None and "bias" in name:
            parameter.grad.data = 0.5 * parameter.grad.data
        elif parameter.grad is not None:
            parameter.grad = None if "1" in name and parameter.grad.norm() < 0.05 else parameter.grad.clamp(-0.01, 0.01)


EXPERTS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def mixtral() -> nn.Module:
    """Sparse experts, whose balance is a loss of a whole micro-batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **EXPERTS))


def qwen() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    own: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**own, **EXPERTS))


class Case(NamedTuple):
    """A job, and how near its numbers are to those of others."""

    job: Callable[..., Setup]
    """makes it, of the fields that are changed"""
    near: float = 1e-5
    """to a plain loop, as a relative difference; there is none for what draws: it would draw in another order"""
    wide: float = 1e-5
    """of several replicas to one"""
    plain: Mapping[str, Any] = {}
    """options of the plain loop, see ``train_plainly``"""
    draws: bool = False
    steps: int = STEPS


def of(**given: Any) -> Callable[..., Setup]:
    return lambda **more: Setup(**{"dataset": Tokens(padded=True), **given, **more})


def counted(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


CASES = {
    "uneven": Case(of(dataset=Odd(padded=True), global_batch=9)),  # 5 micro-batches, the last of one example
    "one by one": Case(of(dataset=Odd(), micro_batch=1, weight=counted)),
    "dropout": Case(of(build=Dropping), draws=True),
    "momentum, scheduled, unclipped": Case(of(optimizer=momentum, scheduler=by_step, clip=None)),
    "groups": Case(of(optimizer=filtered, scheduler=by_place)),
    "frozen": Case(of(build=frozen, optimizer=trained_only)),
    "adafactor": Case(of(optimizer=adafactor)),
    "offloaded, sharded": Case(of(offload=True, share=True, optimizer=filtered, scheduler=by_place)),
    "bf16 sums": Case(of(rounds=True, micro_batch=1), wide=2**-8),
    "bf16": Case(of(precision="bf16"), near=2e-3, plain={"whole_batch": False, "weigh": targets}),
    "batch norm": Case(normalised, plain={"whole_batch": False}),
    "adapters": Case(
        of(build=Adapted, optimizer=trained_only, clip=None),
        wide=1e-6,
        plain={"whole_batch": False, "weigh": targets},
    ),
    "complex": Case(of(build=Spectral)),
    "frozen by step": Case(of(frozen=alternating)),
    "gradients remembered": Case(of(optimizer=remembering), steps=max(3, STEPS)),
    "tensors replaced": Case(of(before_step=replaced), steps=max(3, STEPS)),
    "terms": Case(of(build=test_terms.Detection, dataset=Sentences(), clip=None), near=2e-6, wide=1e-6),
}
NIGHTLY = {
    "frozen by step, other models": Case(of(build=tiny_gpt2, dataset=Tokens(), frozen=alternating)),
    "fused": Case(of(optimizer=fused)),
    "two optimizers": Case(of(optimizer=muon_and_adamw)),
    "global norm": Case(of(optimizer=over(SharedLamb), clip=None), wide=1e-6),
    "compiled": Case(of(compiler=Compiler("aot_eager"))),
    "drawn as written": Case(of(build=odd_modules.drawing, dataset=Padded()), draws=True),
    "lengths": Case(test_length_variants.setup, plain={"whole_batch": False, "weigh": targets}),
    "gpt2": Case(of(build=tiny_gpt2, dataset=Tokens())),
    "whole": Case(of(dataset=Tokens())),
    "offloaded": Case(of(offload=True)),
    "sharded": Case(of(share=True)),
    "one cycle": Case(of(optimizer=filtered, scheduler=one_cycle)),
    "adafactor of transformers": Case(of(optimizer=adafactor_of_transformers)),
    "bf16 in bf16 sums": Case(
        of(precision="bf16", rounds=True, micro_batch=1),
        near=2e-3,
        wide=2**-8,
        plain={"whole_batch": False, "weigh": targets},
    ),
    "bf16 gpt2": Case(
        of(build=tiny_gpt2, precision="bf16"),
        near=2e-3,
        plain={"whole_batch": False, "weigh": shifted_targets},
    ),
    "bf16 llama": Case(
        of(build=tiny_llama, precision="bf16"),
        near=2e-3,
        plain={"whole_batch": False, "weigh": shifted_targets},
    ),
    "dropout gpt2": Case(of(build=dropping), draws=True),
    "dropout, padded": Case(of(build=Dropping, dataset=Odd(padded=True)), draws=True),
    "adapters in bf16": Case(
        of(build=in_bf16, optimizer=trained_only, clip=None),
        near=2e-3,
        wide=2e-3,
        plain={"whole_batch": False, "weigh": targets},
    ),
    "complex, unclipped": Case(of(build=Spectral, optimizer=momentum, clip=None)),
    "as written beside compiled": Case(
        of(build=odd_modules.tied_kinds, dataset=Padded(), compiler=Compiler("eager"))  # such modules stay as they are
    ),
    "as written": Case(of(build=odd_modules.tied_kinds, dataset=Padded())),
    "llama": Case(of(build=tiny_llama, dataset=Tokens())),
    "mixtral": Case(of(build=mixtral, dataset=Tokens(size=24)), plain={"whole_batch": False}),
    "qwen": Case(of(build=qwen, dataset=Tokens(size=24)), plain={"whole_batch": False}),
    **{
        f"terms of {build.__name__}": Case(of(build=build, dataset=Sentences(), clip=None), near=2e-6, wide=2e-6)
        for build in test_terms.CASES
    },
}


def shares_of(job: Setup) -> list[list[int]]:
    """Return the micro-batches of each replica in the last run: unlike pipelines may be dealt other ones."""
    current = job.finished[0].current
    assert current is not None
    plan = current.stage.plan
    return [list(plan.micro_batches_of(replica)) for replica in range(plan.replicas)]


def differing(job: Setup, expected: Mapping[str, Tensor]) -> list[str]:
    """Names of parameters and buffers that the last run has left with other bits."""
    found = {**job.parameters(), **job.buffers()}
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY.items()),
    ],
)
def test_any_plan_trains_as_a_plain_loop_and_the_depth_changes_no_bit(case: Case) -> None:
    job = case.job()
    alone = job.on_pipelines(1, steps=case.steps)
    values = {**job.parameters(), **job.buffers()}
    if not case.draws:
        plain = train_plainly(job, case.steps, **case.plain)
        assert worst(alone, plain.curve) < case.near
        updated = job.buffers()
        for name in updated:
            torch.testing.assert_close(updated[name], plain.buffers[name], rtol=1e-5, atol=1e-6)
    for depth in DEEPER:
        assert job.on_pipelines(depth, steps=case.steps) == alone, depth
        assert not differing(job, values), depth
    first, *others = WIDER
    wide = job.on_pipelines(*first, steps=case.steps)
    assert worst(wide, alone) < case.wide
    values = {**job.parameters(), **job.buffers()}
    shares = shares_of(job)
    for depths in others:
        found = job.on_pipelines(*depths, steps=case.steps)
        if shares_of(job) == shares:
            assert found == wide, depths
            assert not differing(job, values), depths
        else:
            assert len(set(depths)) > 1, depths
            assert worst(found, wide) < case.wide, depths
    for more in MORE:
        assert worst(job.on_pipelines(*more, steps=case.steps), alone) < case.wide, more


class Placed(NamedTuple):
    """A job with and without options that say where state lives, and a plan."""

    options: Mapping[str, bool]
    given: Mapping[str, Any]
    grid: tuple[int, int]


OFFLOAD, SHARE = {"offload": True}, {"share": True}
BOTH = {**OFFLOAD, **SHARE}
OVERFLOWS = {"precision": "fp16", "unit": 1.0}  # in the first steps
PLACED = {
    "offload": Placed(OFFLOAD, {"optimizer": grouped, "scheduler": warm, "clip": 0.5}, (2, 1)),  # tied embeddings
    "offload fp16": Placed(OFFLOAD, OVERFLOWS, (2, 1)),
    "share": Placed(SHARE, {"optimizer": grouped, "scheduler": warm, "clip": 0.5}, (2, 3)),
    "share bf16 sums": Placed(SHARE, {"rounds": True, "clip": 0.5}, (1, 3)),
    "both bf16": Placed(BOTH, {"precision": "bf16"}, (1, 3)),
    "both bf16, frozen by step": Placed(BOTH, {"precision": "bf16", "frozen": alternating}, (2, 3)),
}
PLACED_NIGHTLY = [
    *(Placed(OFFLOAD, {"optimizer": optimizer, "scheduler": warm, "clip": 0.5}, grid) for optimizer, grid in (
        (momentum, (2, 2)), (None, (1, 1)), (adagrad, (2, 1)), (grouped, (2, 2)), (fused, (2, 1)),
    )),
    *(Placed(SHARE, {"optimizer": optimizer, "scheduler": warm, "clip": 0.5}, grid) for optimizer, grid in (
        (None, (1, 3)), (momentum, (2, 4)), (None, (1, 4)), (None, (2, 2)), (None, (2, 1)),
    )),
    *(Placed(options, given, grid) for given in ({"precision": "bf16"}, OVERFLOWS) for options, grid in (
        (OFFLOAD, (2, 2)), (SHARE, (1, 4)), (BOTH, (1, 4)),
    )),
    Placed(BOTH, {"optimizer": grouped, "scheduler": warm}, (2, 3)),
    *(Placed(options, {"optimizer": KINDS["wrapper"]}, (2, 3)) for options in (OFFLOAD, SHARE)),  # it counts steps
    Placed(OFFLOAD, {"frozen": alternating, "before_step": replaced}, (2, 2)),
    Placed(SHARE, {"frozen": alternating, "before_step": replaced}, (2, 3)),
    Placed(OFFLOAD, {**OVERFLOWS, "frozen": alternating}, (2, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    "placed",
    [
        *(pytest.param(each, id=name) for name, each in PLACED.items()),
        *nightly(*PLACED_NIGHTLY),
    ],
)
def test_where_state_lives_changes_no_bit(placed: Placed) -> None:
    given = {name: value for name, value in placed.given.items() if value is not None}
    steps = by_depth(3, 6)
    plain, other = of(**given)(), of(**given, **placed.options)()
    assert repr(other.losses(*placed.grid, steps)) == repr(plain.losses(*placed.grid, steps))  # NaN differs from NaN
    assert same(other.states(), plain.states())
    for one, two in zip(other.finished, plain.finished, strict=True):
        assert one.current is not None
        assert two.current is not None
        assert one.current.stage.sharding.complete
        half = {name: value.to(other.recipe.dtype) for name, value in two.current.stage.parameters.items()}
        assert same({name: value.to(other.recipe.dtype) for name, value in one.current.stage.parameters.items()}, half)
