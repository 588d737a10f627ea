"""Every feature runs on a device that is not the first one, in any plan: no wrong device, no missing call.

Kernels compute nothing here, so a step that is done with some loss is all that can be said.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import varuna
import varuna.testing
from tests.unit.engine.device.test_staging import away
from tests.unit.engine.models import Tokens, adamw, dropping, tiny_gpt2, tiny_llama
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.test_batch_norm import setup as normalised
from tests.unit.engine.stage.test_frozen_stream import Deep

DEVICE = "cuda:1"


def fused(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3, fused=True)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=1e-3, momentum=0.9)


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([parameter for _, parameter in named])


def warm(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


class Recurrent(nn.Module):
    """An LSTM, whose kernels choose weights by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(64, 16), nn.LSTM(16, 16, 2), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        hidden, _ = self.lstm(self.embedding(input_ids).transpose(0, 1))
        logits = self.head(hidden.transpose(0, 1))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fused": {"optimizer": fused},
    "sgd": {"optimizer": sgd},
    "adafactor": {"optimizer": adafactor},
    "clip and scheduler": {"clip_grad_norm": 1.0, "lr_scheduler": warm},
    "average": {"ema": 0.9},
    "offload": {"memory": varuna.Memory(offload_optimizer=True)},
    "offload bf16": {"memory": varuna.Memory(offload_optimizer=True), "precision": "bf16"},
    "streamed": {"model": Deep, "memory": varuna.Memory(stream_frozen=True)},
    "streamed bf16": {"model": Deep, "memory": varuna.Memory(stream_frozen=True), "precision": "bf16"},
    "readers": {"num_workers": 2},
    "aot_eager": {"compile": "aot_eager"},
    "dropout": {"model": dropping},
    "padding": {"dataset": Tokens(padded=True)},
    "lstm": {"model": Recurrent},
    "llama": {"model": tiny_llama},
}


def train(steps: int = 2, **options: Any) -> varuna.Trainer:
    """A trainer that has done some steps."""
    given: dict[str, Any] = {"model": tiny_gpt2, "dataset": Tokens(), "optimizer": adamw, "on_nan": "stop", **options}
    trainer = varuna.Trainer(**given, global_batch=8, micro_batch=2, device=DEVICE)
    assert [step.index for step in trainer.steps(steps)] == list(range(steps))
    return trainer


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process_trains_on_the_second_device_alone(name: str) -> None:
    train(**OPTIONS[name])
    assert torch.cuda.memory_reserved(1) > 0
    assert torch.cuda.memory_reserved(0) == 0


PIPELINES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "two stages": (2, 1, {}),
    "two replicas": (1, 2, {}),
    "both, with dropout": (2, 2, {"build": dropping}),
    "bf16": (3, 1, {"build": tiny_llama, "precision": "bf16"}),
    "fp16, offloaded": (2, 1, {"precision": "fp16", "offload": True}),
    "stashed inputs": (3, 1, {"build": dropping, "micro_batch": 1, "adjusted": away, "offload": True}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_and_replicas(name: str) -> None:
    stages, replicas, options = PIPELINES[name]
    setup = Setup(**{"build": tiny_gpt2, "global_batch": 12, "device": DEVICE, **options})
    assert len(setup.losses(stages, replicas)) > 1
    assert torch.cuda.memory_reserved(0) == 0


def test_running_statistics() -> None:
    assert len(normalised(device=DEVICE).losses(2, 2)) > 1


def test_checkpoints_and_a_resume(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"checkpoints": varuna.Checkpoints(tmp_path, every=1), "precision": "bf16"}
    train(2, **saved)
    trainer = varuna.Trainer(
        tiny_gpt2, Tokens(), adamw, global_batch=8, micro_batch=2, device=DEVICE, on_nan="stop", **saved
    )
    assert [step.index for step in trainer.steps(3)] == [2]
    assert torch.cuda.memory_reserved(0) == 0


def test_what_runs_beside_training() -> None:
    trainer = train()
    assert trainer.evaluate(Tokens(), examples=4).complete
    assert trainer.predict(Tokens(), examples=4) is not None
    assert trainer.generate([[1, 2, 3]], 2) is not None
    assert torch.cuda.memory_reserved(0) == 0


@pytest.mark.parametrize("shapes", [{4: 2, 3: 3}, {3: 3, 2: 2}], ids=str)
def test_morphs_move_state_from_device_to_device(shapes: dict[int, int]) -> None:
    def script() -> list[int]:
        trainer = varuna.Trainer(tiny_gpt2, Tokens(), fused, global_batch=36, micro_batch=1, device=DEVICE)
        return [step.index for step in trainer.steps(4)]

    workers = max(shapes)
    lost = varuna.testing.run(
        script, workers=workers, stages=shapes, faults=[varuna.testing.fail_at(rank=1, step=2, phase="B", after=6)]
    )
    assert len(lost.plans) == 2
    assert len(lost.losses) == 4
