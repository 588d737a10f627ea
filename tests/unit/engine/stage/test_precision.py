"""bf16 and fp16 over fp32 parameters, against a plain eager loop of the same precision."""

import math

import pytest
import torch
from torch import nn

import varuna
from tests.depth import by_depth, nightly
from tests.unit.engine.models import SmallLanguage, Tokens, adamw, tiny_gpt2
from tests.unit.engine.plain import targets, train_plainly, worst
from tests.unit.engine.ranks import Setup
from varuna.checkpoint.io.section_state import from_bytes, to_bytes
from varuna.core.errors import UsageError
from varuna.core.model import Network
from varuna.core.precision import LossScale, Precision
from varuna.engine.stage.optimizer import NamedParameters
from varuna.engine.stage.stage import Stage
from varuna.trainer import Trainer


def half(precision: Precision, **given: object) -> Setup:
    return Setup(dataset=Tokens(padded=True), precision=precision, **given)  # type: ignore[arg-type]


def skipped_by(curve: list[tuple[float, float]]) -> list[int]:
    return [step for step, (_, norm) in enumerate(curve) if not math.isfinite(norm)]


@pytest.mark.parametrize("grid", [(2, 2), *nightly((1, 1), (3, 1))])
def test_fp16_skips_the_steps_that_a_plain_loop_skips(grid: tuple[int, int]) -> None:
    setup = half("fp16", unit=1.0)  # seeds of sums, not of a mean: the first scales overflow
    steps = by_depth(8, 12)
    plain = train_plainly(setup, steps, whole_batch=False, weigh=targets, scale=LossScale())
    found = setup.losses(*grid, steps)
    assert skipped_by(found) == plain.skipped
    assert 2 < len(plain.skipped) < steps - 1
    kept = [step for step in range(steps) if step not in plain.skipped]
    assert worst([found[s] for s in kept], [plain.curve[s] for s in kept]) < 2e-3
    assert all(value.dtype is torch.float32 for value in setup.parameters().values())


@pytest.mark.nightly
def test_shared_values_are_combined_though_the_first_steps_are_skipped() -> None:
    seen: list[float] = []

    def count(named: NamedParameters) -> None:
        own = sum(value.numel() for _, value in named if varuna.owned(value))
        seen.append(float(varuna.all_reduce_shared(torch.tensor(float(own)))))

    setup = half("fp16", unit=1.0)
    setup.before_step = count
    skipped = skipped_by(setup.losses(2, 1, steps=by_depth(6, 12)))
    assert skipped[0] == 0
    assert len(seen) == 2 * (by_depth(6, 12) - len(skipped))
    assert len(set(seen)) == 1


def test_the_scale_goes_wherever_state_goes() -> None:
    setup = half("fp16")
    setup.losses(1, 1, steps=6)
    generation = setup.finished[0].current
    assert generation is not None
    stage = generation.stage
    assert stage.loss_scale is not None
    assert stage.loss_scale.value < LossScale().value
    assert stage.loss_scale.good_steps > 0
    states = {section: from_bytes(to_bytes(stage.state_of(section))) for section in stage.sections}
    rebuilt = Stage(stage.job, stage.plan, 0, states, 6)
    assert rebuilt.loss_scale == stage.loss_scale


def test_the_scale_halves_on_overflow_and_doubles_after_2000_good_steps() -> None:
    scale = LossScale().after(True).after(True)
    assert scale == (2.0**14, 0)
    for _ in range(2000):
        scale = scale.after(False)
    assert scale == (2.0**15, 0)


def test_frozen_parameters_are_kept_in_the_compute_dtype_only() -> None:
    setup = half("bf16", build=partly_frozen)
    curve = setup.losses(2, 1)
    found = setup.parameters()
    assert found["layers.1.weight"].dtype is torch.bfloat16
    assert found["layers.2.weight"].dtype is torch.float32
    assert setup.losses(1, 1) == curve


def partly_frozen() -> nn.Module:
    model = SmallLanguage()
    model.layers[1].requires_grad_(False)
    return model


def test_half_precision_halves_parameters_and_messages_and_counts_fp32_copies() -> None:
    whole, halved = Setup().model.facts.sections, half("bf16").model.facts.sections
    for full, low in zip(whole, halved, strict=True):
        assert low.parameter_bytes * 2 == full.parameter_bytes
        assert low.boundary_bytes * 2 == full.boundary_bytes
        assert low.gradient_bytes == full.gradient_bytes
        assert low.optimizer_bytes == full.optimizer_bytes + full.trainable_bytes


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(UsageError, match="fp32, bf16"):
        Network(reduction="fp16")  # type: ignore[arg-type]


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(UsageError, match="fp32, bf16, fp16"):
        Trainer(tiny_gpt2, Tokens(), adamw, 8, precision="fp8")  # type: ignore[arg-type]
