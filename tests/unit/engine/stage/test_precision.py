"""bf16 and fp16 over fp32 parameters, against a plain eager loop of the same precision."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import varuna
from tests.unit.engine.ranks import Setup, SmallLanguage, Tokens, adamw, single_threaded, tiny_gpt2, tiny_llama, worst
from varuna.checkpoint.io.section_state import from_bytes, to_bytes
from varuna.core.errors import UsageError
from varuna.core.model import Network
from varuna.core.precision import LossScale, Precision
from varuna.data import sample_index
from varuna.engine.stage.optimizer import NamedParameters
from varuna.engine.stage.precision import DTYPES
from varuna.engine.stage.stage import Stage
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def reference(setup: Setup, steps: int, scale: LossScale | None = None) -> tuple[list[tuple[float, float]], list[int]]:
    """(loss, gradient norm) of each step, and the skipped steps: what anyone would write, with nothing of Varuna."""
    torch.manual_seed(setup.seed)
    masters = setup.build().train()
    named = list(masters.named_parameters())
    model = setup.build().train().to(DTYPES[setup.precision])
    optimizer = setup.optimizer(named)
    curve, skipped = [], []
    for step in range(steps):
        with torch.no_grad():
            for copy, (_, master) in zip(model.parameters(), named, strict=True):
                copy.copy_(master)
        sums = [torch.zeros_like(master) for _, master in named]
        losses, weights = 0.0, 0.0
        for first in range(step * setup.global_batch, (step + 1) * setup.global_batch, setup.micro_batch):
            positions = range(first, first + setup.micro_batch)
            samples = [setup.dataset[sample_index(p, size=len(setup.dataset), seed=setup.seed)] for p in positions]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            model.zero_grad()
            output = model(**batch)
            loss = getattr(output, "loss", output)
            counted = batch["labels"] if output is loss else batch["labels"][:, 1:]  # transformers shifts them
            weight = float((counted != -100).sum())
            (loss * (weight * (scale.value / setup.unit if scale else 1.0))).backward()
            for total, copy in zip(sums, model.parameters(), strict=True):
                assert copy.grad is not None
                total += copy.grad
            losses += float(loss.detach()) * weight
            weights += weight
        for total, (_, master) in zip(sums, named, strict=True):
            master.grad = total / weights / (scale.value / setup.unit if scale else 1.0)
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), setup.clip or math.inf)
        if scale is None or torch.isfinite(norm):
            optimizer.step()
        else:
            skipped.append(step)
        scale = scale.after(not torch.isfinite(norm)) if scale else None
        curve.append((losses / weights, float(norm)))
    return curve, skipped


def half(precision: Precision, **given: object) -> Setup:
    return Setup(dataset=Tokens(padded=True), precision=precision, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_bf16_follows_a_plain_loop_in_every_plan(build: object) -> None:
    setup = half("bf16", build=build)
    expected, _ = reference(setup, 4)
    flat = setup.losses(1, 1, steps=4)
    assert worst(flat, expected) < 2e-3
    weights = setup.parameters()
    assert setup.losses(3, 1, steps=4) == flat
    deep = setup.parameters()
    assert all(torch.equal(deep[name], value) for name, value in weights.items())
    assert all(value.dtype is torch.float32 for value in weights.values())
    assert worst(setup.losses(2, 2, steps=4), flat) < 1e-5


def skipped_by(curve: list[tuple[float, float]]) -> list[int]:
    return [step for step, (_, norm) in enumerate(curve) if not math.isfinite(norm)]


@pytest.mark.parametrize("grid", [(1, 1), (3, 1), (2, 2)])
def test_fp16_skips_the_steps_that_a_plain_loop_skips(grid: tuple[int, int]) -> None:
    setup = half("fp16", unit=1.0)  # seeds of sums, not of a mean: the first scales overflow
    expected, skipped = reference(setup, 12, LossScale())
    found = setup.losses(*grid, steps=12)
    assert skipped_by(found) == skipped
    assert 2 < len(skipped) < 11
    kept = [step for step in range(12) if step not in skipped]
    assert worst([found[s] for s in kept], [expected[s] for s in kept]) < 2e-3


def test_shared_values_are_combined_though_the_first_steps_are_skipped() -> None:
    seen: list[float] = []

    def count(named: NamedParameters) -> None:
        own = sum(value.numel() for _, value in named if varuna.owned(value))
        seen.append(float(varuna.all_reduce_shared(torch.tensor(float(own)))))

    setup = half("fp16", unit=1.0)
    setup.before_step = count
    skipped = skipped_by(setup.losses(2, 1, steps=12))
    assert skipped[0] == 0
    assert len(seen) == 2 * (12 - len(skipped))
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
