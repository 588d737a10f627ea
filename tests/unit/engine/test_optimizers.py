"""Optimizers that people use, exact against a plain loop in every plan and across a change of plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.ranks import Setup, reference, single_threaded, worst
from tests.unit.engine.worker.test_resuming import train


def split(named: Any) -> tuple[list[Any], list[Any]]:
    """Matrices of the layers, and all the rest: on a stage either may be empty."""
    matrices = [p for name, p in named if "layers" in name and p.dim() == 2]
    return matrices, [p for name, p in named if not ("layers" in name and p.dim() == 2)]


def muon_and_adamw(named: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = split(named)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=1e-2))
    if rest:
        found.append(torch.optim.AdamW(rest, lr=1e-3))
    return found


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for _, p in named], lr=1e-2)


def hugging_faces_adafactor(named: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    found: torch.optim.Optimizer = Adafactor(  # type: ignore[no-untyped-call]
        [p for _, p in named], lr=1e-2, relative_step=False, scale_parameter=True
    )
    return found


@pytest.mark.parametrize("optimizer", [muon_and_adamw, adafactor, hugging_faces_adafactor])
def test_every_plan_trains_as_a_plain_loop(optimizer: Callable[[Any], Any], tmp_path: Path) -> None:
    place = str(tmp_path)
    with single_threaded():
        expected = reference(Setup(optimizer=optimizer), 4)
        for stages, replicas in ((1, 1), (2, 1), (2, 2)):
            assert worst(Setup(optimizer=optimizer).losses(stages, replicas, 4), expected) < 1e-5
        first = train(Setup(optimizer=optimizer, directory=place), 2, 2, 2, place)
        assert worst([*first, *train(Setup(optimizer=optimizer, directory=place), 3, 1, 4, place)], expected) < 1e-5
