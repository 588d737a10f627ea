"""Needs of the user's optimizer, from a trial on fake tensors."""

from typing import Any

import pytest
import torch

from varuna.core.errors import ModelError
from varuna.partition.optimizer_needs import try_update

SHAPES = {"a": (100, 10), "b": (300, 10), "c": (10,)}
SECTIONS = [["a", "c"], ["b"], []]
A, B, C = (4 * torch.Size(shape).numel() for shape in SHAPES.values())


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named])


def plain(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def test_state_and_what_a_step_needs_beside_it() -> None:
    found = try_update(adamw, SHAPES, SECTIONS, on_cpu=True)
    assert found.state_bytes == {"a": 2 * A + 4, "b": 2 * B + 4, "c": 2 * C + 4}  # and a counter of steps
    assert found.step_bytes[0] == pytest.approx(2 * A * (2 * B + A) / (2 * B), rel=0.1)
    assert found.step_bytes[1] == pytest.approx(2 * B + A, rel=0.1)  # of one parameter, and what the last one leaves
    assert found.step_bytes[2] == 0
    assert not found.together
    assert not found.combines


def test_on_a_gpu_torch_updates_all_parameters_together() -> None:
    shapes = {f"{number}": (1000,) for number in range(8)}
    found = try_update(adamw, shapes, [["0", "1"], list("234567")], on_cpu=False)
    assert found.together
    assert found.step_bytes == (2 * 4000, 6 * 4000)


def test_an_optimizer_without_intermediate_results_needs_nothing() -> None:
    assert try_update(plain, SHAPES, SECTIONS, on_cpu=True).step_bytes == (0, 0, 0)


class Own(torch.optim.SGD):
    """Not torch's: its step may do anything."""


def hooked(named: Any) -> torch.optim.Optimizer:
    built = plain(named)
    built.register_step_pre_hook(lambda *_: None)
    return built


def patched(named: Any) -> torch.optim.Optimizer:
    built = plain(named)
    built.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return built


@pytest.mark.parametrize("factory", [lambda named: Own([p for _, p in named], lr=0.1), hooked, patched])
def test_only_torchs_own_code_is_known_not_to_combine_values(factory: Any) -> None:
    assert try_update(factory, SHAPES, SECTIONS, on_cpu=True).combines


def test_what_cannot_run_on_fake_tensors_is_assumed() -> None:
    def reading(named: Any) -> torch.optim.Optimizer:
        float(named[0][1].sum())
        return adamw(named)

    found = try_update(reading, SHAPES, SECTIONS, on_cpu=True)
    assert found.state_bytes == {"a": 2 * A, "b": 2 * B, "c": 2 * C}
    assert found.step_bytes == (2 * A, 2 * B, 0)
    assert found.combines


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError("no such file"), RuntimeError("can't allocate memory"), ImportError("bitsandbytes")],
)
def test_what_only_this_machine_lacks_is_refused_and_never_estimated(error: Exception) -> None:
    def lacking(named: Any) -> torch.optim.Optimizer:
        raise error

    with pytest.raises(ModelError, match=f"optimizer= failed on this machine .* {type(error).__name__}: .*start again"):
        try_update(lacking, SHAPES, SECTIONS, on_cpu=True)
