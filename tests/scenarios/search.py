"""A script of several trainings: learning rates are tried, then the best of them trains a larger model's head.

    python search.py FOLDER [FAULT,...]

A fault is ``WORKER@K.STEP`` (in training K, after a step) or ``WORKER@K.end`` (behind its loop): the worker kills
itself.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varuna

FOLDER, FAULTS = Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else []
WORKER = os.environ.get("VARUNA_WORKER", "")
CHECKPOINTS = os.environ.get("SEARCH_CHECKPOINTS", "")
STEPS, RATES = 10, (0.1, 0.02)


def sample(index: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(index)
    x = torch.randn(4, generator=draws)
    return {"input": x, "y": x.sum(0, keepdim=True)}


DATA = [sample(index) for index in range(24)]


def perish(moment: str) -> None:
    if f"{WORKER}@{moment}" in FAULTS:
        os.kill(os.getpid(), signal.SIGKILL)


def loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def train(number: int, model: nn.Module, rate: float) -> float:
    lowest = {"loss": float("inf")}
    trainer = varuna.Trainer(
        model,
        DATA,
        torch.optim.Adam(model.parameters(), lr=rate),
        global_batch=8,
        micro_batch=2,
        loss=loss,
        state={"lowest": lowest},
        checkpoints=f"{CHECKPOINTS}/{number}" if CHECKPOINTS else None,
    )
    for step in trainer.steps(STEPS):
        lowest["loss"] = min(lowest["loss"], step.loss)
        if step.is_main:
            print(f"training {number} step {step.index} loss {step.loss!r}", flush=True)
        if WORKER:
            time.sleep(0.02)
        perish(f"{number}.{step.index}")
    perish(f"{number}.end")
    found = trainer.evaluate(DATA, examples=16)
    weights = float(sum(p.detach().abs().sum() for p in model.parameters()))
    with (FOLDER / "seen").open("a") as file:  # on all workers: whatever they ask of a training, they see the same
        file.write(f"{number} {lowest['loss']!r} {found.loss!r} {weights!r}\n")
    trainer.export(FOLDER / f"{number}.safetensors")
    return found.loss


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.05), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


torch.manual_seed(1)  # once: what is drawn for a model follows from what was drawn before
tried = []
for number, rate in enumerate(RATES):
    body = network()
    tried.append((train(number, body, rate), rate, body))
_, rate, body = min(tried, key=lambda each: each[0])
train(len(RATES), nn.Sequential(*body, nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), rate)
