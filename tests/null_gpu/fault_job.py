"""A small job on a GPU that is none, which may do what breaks GPUs.

``FAULT_AT=8`` and ``FAULT_OF="w1 w2"``: in step 8 these workers get an error of CUDA after their gradients are reduced,
or run out of memory there (``FAULT_IS=memory``) or before (``FAULT_IS=actions``), the first ``FAULT_TIMES=1`` times.
``FAULT_BOUND=4``: a GPU that does nothing for so many seconds hangs.
"""

import os

import torch
from torch import nn

import varuna
import varuna.job.start as start
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.stage.stage import Stage

STEPS = 40
AT, OF = int(os.environ.get("FAULT_AT", "-1")), os.environ.get("FAULT_OF", "").split()
KIND, TIMES = os.environ.get("FAULT_IS", ""), int(os.environ.get("FAULT_TIMES", "1"))
squared_norms, clear_gradients = Stage.squared_norms, Stage.clear_gradients
left = [TIMES if os.environ.get("VARUNA_WORKER") in OF else 0]


def is_due(stage: Stage) -> bool:
    """Whether it is time for a fault."""
    if stage.next_step != AT or not left[0]:
        return False
    left[0] -= 1
    return True


def cleared(stage: Stage) -> None:
    """Begin the actions of a step."""
    if KIND == "actions" and is_due(stage):
        torch.empty(2**42, dtype=torch.uint8, device="cuda")
    clear_gradients(stage)


def norms(stage: Stage) -> dict[int, float]:
    """Squared norms; what the memory holds instead may be below 0."""
    if KIND != "actions" and is_due(stage):
        if KIND == "memory":
            torch.empty(2**42, dtype=torch.uint8, device="cuda")
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return dict.fromkeys(squared_norms(stage), 1.0)


class Net(nn.Module):
    """Layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return nn.functional.mse_loss(x.mean(-1), y)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((64,), index / 1000), "y": torch.tensor(index / 1000)}


def main() -> None:
    """Train."""
    Stage.squared_norms = norms  # type: ignore[method-assign, assignment]
    Stage.clear_gradients = cleared  # type: ignore[method-assign, assignment]
    if bound := os.environ.get("FAULT_BOUND"):
        vars(start)["Patience"] = lambda: Patience(stalled_s=float(bound), forming_s=60.0, look_s=0.5)
    torch.manual_seed(0)
    trainer = varuna.Trainer(
        model=Net,
        dataset=Samples(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        global_batch=12,
        micro_batch=2,
    )
    for step in trainer.steps(STEPS):
        print(f"step {step.index}", flush=True)


if __name__ == "__main__":
    main()
