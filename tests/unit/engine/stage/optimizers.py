"""Optimizers as public libraries write them, in few lines: each keeps something where torch's own keep nothing."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


class CountsInGroup(Optimizer):
    """Adam that counts its steps in the group (apex' FusedAdam, timm's Lamb)."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(one).add_(p.grad, alpha=1 - one)
                state["v"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                size = (state["v"] / (1 - two ** group["step"])).sqrt() + 1e-6
                p.add_(state["m"] / (1 - one ** group["step"]) / size, alpha=-group["lr"])


class ScheduleFree(Optimizer):
    """Averages with weights that follow the largest rate so far, in training mode only (schedule-free)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False})

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            lr = group["lr"] * min(1.0, (group["k"] + 1) / 4)
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], weight / group["weight_sum"])
                p.add_(p.grad, alpha=lr * (0.9 * (1 - weight / group["weight_sum"]) - 1))
                state["z"].sub_(p.grad, alpha=lr)
            group["k"] += 1


class Lookahead(Optimizer):
    """Wraps an optimizer, shares its groups, and has a counter, and state of its own."""

    def __init__(self, inner: Optimizer, every: int = 3) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.every, self.counter = inner, every, 0
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.counter += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            if self.counter % self.every == 0:
                p.copy_(slow.lerp_(p, 0.5))


class Schedule:
    """A plain object of an optimizer's own."""

    def __init__(self) -> None:
        self.done, self.recent = 0, [0.0]

    def next(self) -> float:
        self.done += 1
        self.recent = [*self.recent[-2:], 1.0 / self.done]
        return sum(self.recent)


class Attributes(Optimizer):
    """Has an option that no group has, a schedule of its own, and names by the parameters' ids."""

    def __init__(
        self, params: Iterable[Any], model: nn.Module | None, lr: float = 0.1, decoupled: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.1})
        self.decoupled, self.schedule = decoupled, Schedule()
        self.biases = {id(p) for p in model.parameters() if p.dim() < 2} if model is not None else set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.schedule.next()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if id(p) in self.biases:
                    factor *= 0.5
                grad = p.grad if self.decoupled else p.grad.add(p, alpha=group["decay"])
                p.sub_(grad, alpha=group["lr"] * factor)
                if id(p) in self.biases:
                    factor *= 2


class Whitening(Optimizer):
    """Keeps lists and tuples of tensors with each parameter (SOAP, Shampoo)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["sums"] = [torch.zeros(size) for size in p.shape]
                    state["shape"], state["count"] = (tuple(p.shape), "all"), {"steps": 0}
                state["count"]["steps"] += 1
                grad = p.grad.clone()
                for axis, total in enumerate(state["sums"] if p.dim() else []):
                    others = [each for each in range(p.dim()) if each != axis]
                    total.add_(p.grad.square().sum(dim=others) if others else p.grad.square())
                    grad.div_(total.sqrt().add(0.1).reshape([-1 if each == axis else 1 for each in range(p.dim())]))
                p.sub_(grad, alpha=group["lr"] / state["count"]["steps"])


class FindsItsRate(Optimizer):
    """Has its rate as a tensor in the group, and grows it by what it has done so far."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.01)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"].mul_(1.5)
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])


class OverAll(Optimizer):
    """Takes its step size from sums over all parameters (Prodigy, D-Adaptation)."""

    def __init__(self, params: Any, d: float = 1e-3) -> None:
        super().__init__(params, {"lr": 1.0, "d": d})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                total += p.grad.abs().sum().item()
        for group in self.param_groups:
            group["d"] = max(group["d"], 1e-3 * total)
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["d"])


class Noisy(SGD):
    """Adds noise to the update (SGLD)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


def values(named: Iterable[tuple[str, Any]]) -> list[Tensor]:
    """Parameters of a list of (name, parameter)."""
    return [p for _, p in named]


def counts_in_group(named: Any) -> Optimizer:
    return CountsInGroup(values(named))


def schedule_free(named: Any) -> Optimizer:
    found = ScheduleFree(values(named))
    found.train()
    return found


def lookahead(named: Any) -> Optimizer:
    return Lookahead(SGD(values(named), lr=0.1, momentum=0.9))


def several(named: Any) -> list[Optimizer]:
    """Two wrappers, each over an optimizer of its own; either may have nothing on a stage."""
    matrices = [p for _, p in named if p.dim() == 2]
    others = [p for _, p in named if p.dim() != 2]
    wrapped = [Lookahead(CountsInGroup(matrices))] if matrices else []
    return [*wrapped, *([Lookahead(SGD(others, lr=0.1, momentum=0.9), 2)] if others else [])]


def attributes(named: Any) -> Optimizer:
    return Attributes(values(named), None)


def whitening(named: Any) -> Optimizer:
    return Whitening(values(named))


def finds_its_rate(named: Any) -> Optimizer:
    return FindsItsRate(values(named))


def groups(named: Any) -> Optimizer:
    """Two groups, of which one may be empty on a stage."""
    matrices = [p for _, p in named if p.dim() == 2]
    return CountsInGroup([{"params": matrices, "lr": 0.02}, {"params": [p for _, p in named if p.dim() != 2]}])


KINDS = {
    "counter in the group": counts_in_group,
    "schedule-free": schedule_free,
    "wrapper": lookahead,
    "two wrappers": several,
    "attributes": attributes,
    "lists of tensors": whitening,
    "rate as a tensor": finds_its_rate,
    "two groups": groups,
}
