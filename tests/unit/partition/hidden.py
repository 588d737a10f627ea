"""Code with hidden dependencies, as users and libraries write it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import varuna


def grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Lamb(torch.optim.Optimizer):
    """As third parties write it: layer-wise trust ratios, gradients divided by their global norm (NVLamb)."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def whole(self, squares: Tensor) -> Tensor:
        return squares

    def counted(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        squares = torch.zeros((), dtype=torch.float64)
        for p in self.counted():
            squares += grad(p).double().pow(2).sum()
        norm = self.whole(squares).sqrt().clamp(min=1e-12).float()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                scaled = p.grad / norm
                state["m"].mul_(beta1).add_(scaled, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
                update = state["m"] / (1 - beta1 ** state["step"])
                update = update / ((state["v"] / (1 - beta2 ** state["step"])).sqrt() + 1e-6)
                weight, length = p.norm(), update.norm()
                ratio = torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight))
                p.sub_(update * ratio * group["lr"])


class SharedLamb(Lamb):
    """The same with the one call that a pipeline needs."""

    def whole(self, squares: Tensor) -> Tensor:
        return varuna.all_reduce_shared(squares)

    def counted(self) -> list[Tensor]:
        return [p for p in super().counted() if varuna.owned(p)]


def clip_by_torch(named: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)


def clip_by_hand(named: Any) -> None:
    norm = torch.cat([p.grad.flatten() for _, p in named]).norm()
    for _, p in named:
        p.grad.mul_(1.0 / norm.clamp(min=1.0))


def overflow_by_scaler(named: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def overflow_shared(named: Any) -> None:
    found = torch.zeros(())
    for _, p in named:
        found = torch.maximum(found, (~torch.isfinite(p.grad)).any().float())
    found = varuna.all_reduce_shared(found, op="max")
    for _, p in named:
        p.grad.mul_(1 - found)


def adds_items(named: Any) -> None:
    total = 0.0
    for _, p in named:
        total += p.grad.norm().item() ** 2


def adds_floats(named: Any) -> None:
    total = 0.0
    for _, p in named:
        length = float(p.grad.norm())
        total = total + length**2


def sums_generator(named: Any) -> None:
    sum(p.grad.norm().item() for _, p in named)


def branches(named: Any) -> None:
    """Only what happens gives it away: the values leave as booleans, without adding anything up."""
    finite = True
    for _, p in named:
        if not torch.isfinite(p.grad).all():
            finite = False
    if not finite:
        for _, p in named:
            p.grad.zero_()


def through_numpy(named: Any) -> None:
    total = sum((p.grad.numpy() ** 2).sum() for _, p in named) ** 0.5
    for _, p in named:
        p.grad.mul_(min(1.0, 0.5 / float(total)))


def copies_between_layers(named: Any) -> None:
    first, *_, last = [p for _, p in named if p.dim() == 1]
    with torch.no_grad():
        last.copy_(first)


AVERAGE = torch.full((8,), 0.5)


def uses_a_global(named: Any) -> None:
    for _, p in named:
        if p.shape == AVERAGE.shape:
            p.grad.add_(AVERAGE)


def notes_each(named: Any) -> None:
    """Harmless: one number per parameter."""
    notes: dict[str, float] = {}
    for name, p in named:
        notes[name] = p.grad.norm().item()
        if p.grad.norm() > 1e9:
            p.grad.zero_()


def shares_an_item(named: Any) -> None:
    total = 0.0
    for _, p in named:
        if varuna.owned(p):
            total += p.grad.norm().item() ** 2
    norm = varuna.all_reduce_shared(torch.tensor(total)) ** 0.5
    for _, p in named:
        p.grad.div_(norm)


Factory = Callable[[Any], torch.optim.Optimizer]


def over(build: Callable[..., torch.optim.Optimizer], **options: Any) -> Factory:
    def factory(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return build([p for _, p in named], **options)

    return factory


def shares_memory(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Ties the third layer to the first, but in a way that PyTorch does not know of."""

    def built() -> nn.Module:
        model = build()
        first, second = (model.get_submodule(f"layers.{layer}") for layer in (0, 2))
        second.get_parameter("weight").data = first.get_parameter("weight").data
        return model

    return built
