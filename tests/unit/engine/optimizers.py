"""Optimizers and schedules of many tests."""

from typing import Any

import torch


def trained_only(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-3)


def fused(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, fused=True)


def momentum(named: Any) -> torch.optim.Optimizer:
    """A rounding error of a gradient stays one, whatever its size."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def grouped(named: Any) -> torch.optim.Optimizer:
    """Groups by name, of which a section may have only one."""
    plain = [p for name, p in named if name.endswith("bias") or "ln" in name]
    decayed = [p for name, p in named if not (name.endswith("bias") or "ln" in name)]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 3e-3}], lr=1e-3)


def adagrad(named: Any) -> torch.optim.Optimizer:
    """Makes its state when it is built."""
    return torch.optim.Adagrad([p for _, p in named], lr=0.01)


def warm(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)


def by_step(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def muon_and_adamw(named: Any) -> list[torch.optim.Optimizer]:
    """Matrices of the layers, and all the rest: on a stage either may be empty."""
    matrices = [p for name, p in named if "layers" in name and p.dim() == 2]
    rest = [p for name, p in named if not ("layers" in name and p.dim() == 2)]
    found: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return [*found, torch.optim.AdamW(rest, lr=1e-3)] if rest else found


class Remembering(torch.optim.Optimizer):
    """Keeps the gradient of the step before, not a copy of it, as right in plain PyTorch as a copy."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Extrapolate from two gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    before = self.state[parameter].get("before", gradient)
                    parameter.sub_(gradient + 0.5 * (gradient - before), alpha=group["lr"])
                    self.state[parameter]["before"] = gradient


def remembering(named: Any) -> torch.optim.Optimizer:
    return Remembering([p for _, p in named])


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for _, p in named], lr=1e-2)


def adafactor_of_transformers(named: Any) -> torch.optim.Optimizer:
    from transformers import Adafactor

    found: torch.optim.Optimizer = Adafactor(  # type: ignore[no-untyped-call]
        [p for _, p in named], lr=1e-2, relative_step=False, scale_parameter=True
    )
    return found
