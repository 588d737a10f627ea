"""Situations of public scripts, in our own words: each is a script that runs as a plain loop and over Varuna.

A situation has a title, the thread that it is from, and its outcome: the losses of the plain loop, or a refusal in
words with a way out, which is a script that trains as its plain loop does.
"""

import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler, default_collate

import varuna
import varuna.data
from tests.unit.engine.optimizers import Remembering

STEPS, BATCH, SAMPLES = 4, 8, 40
WIDTH, CLASSES = 12, 5


class Points:
    """Ten features and one of five classes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(10, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x[:CLASSES].argmax()}


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Dropout(drop), nn.Linear(width, width))
        self.middle = nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.middle(self.backbone(x)))


class Way:
    """A way to train: what the script has built, and functions of the loop that may use it between steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: Mapping[str, float] = {}
        """of the newest step"""

    def train(
        self,
        model: Any,
        dataset: Any,
        optimizer: Any,
        *,
        before: Callable[[int], None] = lambda step: None,
        told: Callable[[int, float], None] = lambda step, loss: None,
        **options: Any,
    ) -> None:
        """Train for some steps.

        Args:
            before: is called before each step with its number, as a line at the beginning of the loop's body.
            told: is called after each step with its number and its loss.
        """
        raise NotImplementedError


class OverVaruna(Way):
    """The script with ``varuna.Trainer``."""

    def train(
        self,
        model: Any,
        dataset: Any,
        optimizer: Any,
        *,
        before: Callable[[int], None] = lambda step: None,
        told: Callable[[int, float], None] = lambda step, loss: None,
        **options: Any,
    ) -> None:
        trainer = varuna.Trainer(model, dataset, optimizer, BATCH, device="cpu", **options)
        before(0)
        for step in trainer.steps(STEPS):
            self.losses.append(step.loss)
            self.metrics = step.metrics
            told(step.index, step.loss)
            before(step.index + 1)


class PlainLoop(Way):
    """The script's own loop, over the same samples."""

    def train(
        self,
        model: Any,
        dataset: Any,
        optimizer: Any,
        *,
        before: Callable[[int], None] = lambda step: None,
        told: Callable[[int, float], None] = lambda step, loss: None,
        loss: Any = None,
        collate: Any = default_collate,
        clip_grad_norm: float | None = None,
        lr_scheduler: Any = None,
        before_step: Any = None,
        after_step: Any = None,
        micro_batch: int | None = None,
        metrics: Any = None,
        batch_ramp: Callable[[int], int] = lambda step: BATCH,
        **_: Any,
    ) -> None:
        at = 0
        if not isinstance(model, nn.Module):
            model = model()
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(model.named_parameters())
        for step in range(STEPS):
            before(step)
            count = batch_ramp(step)
            samples = [
                dataset[varuna.data.sample_index(at + place, size=len(dataset), seed=0)] for place in range(count)
            ]
            at += count
            optimizer.zero_grad()
            total, size = 0.0, micro_batch or BATCH
            for first in range(0, count, size):
                some = samples[first : first + size]
                part = _loss(model, collate(some), loss) * len(some) / count
                if metrics is not None:
                    told_now = metrics(model(collate(some)["x"]), collate(some))
                    self.metrics = {key: float(value.detach()) for key, value in told_now.items()}
                part.backward()  # type: ignore[no-untyped-call]
                total += float(part.detach())
            if before_step is not None:
                before_step(list(model.named_parameters()))
            if clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
            optimizer.step()
            if lr_scheduler is not None:
                lr_scheduler.step()
            if after_step is not None:
                with torch.no_grad():
                    after_step(dict(model.named_parameters()), dict(model.named_buffers()), step)
            self.losses.append(total)
            told(step, total)


def _loss(model: nn.Module, batch: Any, loss: Any) -> Tensor:
    given = (
        batch if isinstance(batch, Mapping) and loss is None else {"x": batch["x" if isinstance(batch, Mapping) else 0]}
    )
    output = model(**given)
    if loss is None:
        return output if isinstance(output, Tensor) else output["loss"]
    if isinstance(loss, nn.Module):
        return loss(output, batch["labels"] if isinstance(batch, Mapping) else batch[1])  # type: ignore[no-any-return]
    return loss(output, batch)  # type: ignore[no-any-return]


Script = Callable[[Way], object]


class Situation(NamedTuple):
    """A script, and its outcome."""

    title: str
    """as its user would look for it"""
    script: Script
    met: str
    """the thread that it is from; empty: many scripts do it"""
    refused: str = ""
    """words of the refusal, as a regular expression; empty: it works"""
    instead: Script | None = None
    """the script once the advice is followed"""
    fails_plainly: bool = False
    """it fails in plain PyTorch, too"""


def built(width: int = WIDTH, drop: float = 0.0) -> tuple[Net, torch.optim.SGD]:
    """Build a model and its optimizer, as a script does."""
    torch.manual_seed(0)
    model = Net(width, drop)
    return model, sgd(model.parameters())


def sgd(parameters: Iterable[Any], lr: float = 0.2) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


# -- the loop and the optimizer -----------------------------------------------------------------------------------


def weight_decay_follows_a_cosine(way: Way) -> None:
    model, _ = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.4 - 0.36 * math.cos(math.pi * step / STEPS)

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def plateau_scheduler_in_the_loop(way: Way) -> None:
    model, optimizer = built()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)

    def told(step: int, loss: float) -> None:
        plateau.step(loss)

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def momentum_warms_up(way: Way) -> None:
    model, optimizer = built()

    def before(step: int) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.5 if step < 2 else 0.9

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def batch_that_grows(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=cross_entropy, batch_ramp=lambda step: min(BATCH, 1 + 3 * step))


def group_added_when_unfreezing(way: Way) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd([*model.middle.parameters(), *model.head.parameters()])

    def before(step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 0.01})

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def group_frozen_until_it_begins(way: Way) -> None:
    if isinstance(way, PlainLoop):
        group_added_when_unfreezing(way)
        return
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": [*model.middle.parameters(), *model.head.parameters()], "lr": 0.2},
        {"params": list(model.backbone.parameters()), "lr": 0.01},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)

    def frozen(name: str, step: int) -> bool:
        return name.startswith("backbone.") and step < 2

    way.train(model, Points(), optimizer, loss=cross_entropy, frozen=frozen)


def layers_unfrozen_in_the_loop(way: Way, *, by_option: bool = False) -> None:
    """The backbone begins later, and the layer in the middle ends earlier."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def frozen(name: str, step: int) -> bool:
        return step < 2 if name.startswith("backbone.") else name.startswith("middle.") and step > 2

    def before(step: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen(name, step))

    ways: dict[str, Any] = {"frozen": frozen} if by_option else {"before": before}
    way.train(model, Points(), optimizer, loss=cross_entropy, clip_grad_norm=0.3, **ways)


def layers_frozen_by_step(way: Way) -> None:
    layers_unfrozen_in_the_loop(way, by_option=not isinstance(way, PlainLoop))


def layers_drawn_for_each_step(way: Way) -> None:
    """LISA: the head, and one layer that the step draws."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def frozen(name: str, step: int) -> bool:
        drawn = random.Random(step).choice(["backbone.0", "backbone.3", "middle.1"])
        return not name.startswith((drawn, "head"))

    def before(step: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen(name, step))

    ways: dict[str, Any] = {"before": before} if isinstance(way, PlainLoop) else {"frozen": frozen}
    way.train(model, Points(), optimizer, loss=cross_entropy, **ways)


def gradients_replaced_before_the_update(way: Way) -> None:
    model, _ = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before_step(named: Any) -> None:
        for _, parameter in named:
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


def gradients_remembered_by_the_optimizer(way: Way) -> None:
    model, _ = built()
    way.train(model, Points(), Remembering(model.parameters()), loss=cross_entropy)


def gradients_remembered_before_the_update(way: Way) -> None:
    model, optimizer = built()
    before: dict[str, Tensor] = {}

    def before_step(named: Any) -> None:
        for name, parameter in named:
            last, before[name] = before.get(name), parameter.grad
            if last is not None:
                parameter.grad = parameter.grad + 0.5 * last

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


def small_gradients_dropped_before_the_update(way: Way) -> None:
    model, _ = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before_step(named: Any) -> None:
        for _, parameter in named:
            if parameter.grad.norm() < 0.1:
                parameter.grad = None

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


def optimizer_state_cleared(way: Way) -> None:
    model, optimizer = built()

    def before(step: int) -> None:
        if step == 2:
            optimizer.state.clear()

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def gradients_maximised(way: Way) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, maximize=True, foreach=True)
    way.train(model, Points(), optimizer, loss=lambda output, batch: -cross_entropy(output, batch))


def rate_as_a_tensor(way: Way) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    way.train(model, Points(), optimizer, loss=cross_entropy, lr_scheduler=schedule)


def closure_optimizer(way: Way) -> None:
    torch.manual_seed(0)
    model = Net()
    way.train(model, Points(), torch.optim.LBFGS(model.parameters()), loss=cross_entropy)


class WithTable(Net):
    """Its table has more rows than a batch uses."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 10, sparse=sparse)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.table((10 * x[:, 0]).long() % 64))


def sparse_adam(way: Way) -> None:
    torch.manual_seed(0)
    model = WithTable(sparse=True).requires_grad_(False)
    model.table.requires_grad_()
    optimizer = torch.optim.SparseAdam(list(model.table.parameters()), lr=0.01)
    way.train(model, Points(), optimizer, loss=cross_entropy)


def adam_for_a_table(way: Way) -> None:
    torch.manual_seed(0)
    model = WithTable(sparse=False)
    way.train(model, Points(), torch.optim.Adam(model.parameters(), lr=0.01), loss=cross_entropy)


class Sharpness(torch.optim.Optimizer):
    """SAM: climbs first, and needs the gradients there."""

    def __init__(self, parameters: Iterable[Any], base: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("Sharpness needs a closure for its second pass")
        self.base.step()


def two_passes(way: Way) -> None:
    torch.manual_seed(0)
    model = Net()
    way.train(model, Points(), Sharpness(model.parameters(), torch.optim.SGD, lr=0.1), loss=cross_entropy)


class Prepared(torch.optim.Optimizer):
    """A wrapper like those that ``accelerator.prepare`` returns, which are never set up as optimizers themselves."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


def prepared_optimizer(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), Prepared(optimizer), loss=cross_entropy)


def optimizer_as_built(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=cross_entropy)


def optimizer_that_goes_on(way: Way) -> None:
    """Momentum and rates are those of a training before, and the scheduler counts on."""
    model, optimizer = built()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    schedule.step()
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    way.train(model, Points(), optimizer, loss=cross_entropy, lr_scheduler=schedule)


class Noam:
    """Rates as of "The Annotated Transformer", which count their own steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def advance(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.3 * min(self.count**-0.5, self.count * 2**-1.5)


def rates_that_count_by_themselves(way: Way) -> None:
    model, optimizer = built()
    noam = Noam(optimizer)
    way.train(model, Points(), optimizer, loss=cross_entropy, before=lambda step: noam.advance())


class SlowWeights(torch.optim.Optimizer):
    """Lookahead, as scripts copy it: a wrapper that is never set up as an optimizer itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 2) -> None:
        self.optimizer, self.every = optimizer, every
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = optimizer.state
        for group in self.param_groups:
            group["counted"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            group["counted"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if group["counted"] % self.every == 0:
                    p.copy_(slow.lerp_(p, 0.5))


def optimizer_in_a_wrapper(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), SlowWeights(optimizer), loss=cross_entropy)


def function_of_a_wrapper(way: Way) -> None:
    model, _ = built()
    way.train(model, Points(), lambda named: SlowWeights(sgd([p for _, p in named])), loss=cross_entropy)


def two_optimizers_in_a_list(way: Way) -> None:
    model, _ = built()
    parts = [
        sgd(model.backbone.parameters()),
        torch.optim.AdamW([*model.middle.parameters(), *model.head.parameters()]),
    ]
    way.train(model, Points(), parts, loss=cross_entropy)


def frozen_by_setting_gradients_to_none(way: Way) -> None:
    model, optimizer = built()

    def before_step(named: Any) -> None:
        for name, parameter in named:
            if name.startswith("backbone"):
                parameter.grad = None

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


def gradients_clipped_adaptively(way: Way) -> None:
    model, optimizer = built()

    def before_step(named: Any) -> None:
        for _, parameter in named:
            most = 0.01 * parameter.detach().norm().clamp(min=1e-3)
            parameter.grad.mul_((most / parameter.grad.norm().clamp(min=1e-6)).clamp(max=1.0))

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


# -- the loop and the model ---------------------------------------------------------------------------------------


def dropout_follows_a_schedule(way: Way) -> None:
    model, optimizer = built(drop=0.5)

    def before(step: int) -> None:
        for each in model.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.5 * (1 - step / STEPS)

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


class Tempered(Net):
    """Divides its logits by a temperature, which is a buffer."""

    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) / self.temperature


def temperature_in_a_buffer(way: Way) -> None:
    torch.manual_seed(0)
    model = Tempered()

    def before(step: int) -> None:
        model.temperature.fill_(2.0 - 0.3 * step)

    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy, before=before)


def temperature_after_each_step(way: Way) -> None:
    torch.manual_seed(0)
    model = Tempered()

    def after_step(parameters: Any, buffers: Any, step: int) -> None:
        buffers["temperature"].fill_(2.0 - 0.3 * (step + 1))

    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy, after_step=after_step)


def best_model_kept_by_deepcopy(way: Way) -> None:
    model, optimizer = built()
    best: list[Any] = []

    def told(step: int, loss: float) -> None:
        best.append(copy.deepcopy(model))

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def norms_of_weights_logged(way: Way) -> None:
    model, optimizer = built()
    logged: list[float] = []

    def told(step: int, loss: float) -> None:
        logged.append(sum(float(parameter.detach().norm()) for parameter in model.parameters()))

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def parameters_counted_in_the_loop(way: Way) -> None:
    model, optimizer = built()
    counted: list[int] = []

    def told(step: int, loss: float) -> None:
        counted.append(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)
    assert len(set(counted)) == 1


def gradients_watched_by_hooks(way: Way) -> None:
    """Register a hook for each parameter, as ``wandb.watch(model)`` does."""
    model, optimizer = built()
    seen: list[float] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen.append(float(gradient.norm())))  # type: ignore[no-untyped-call]
    way.train(model, Points(), optimizer, loss=cross_entropy)


def norms_before_the_update(way: Way) -> None:
    model, optimizer = built()
    seen: list[float] = []

    def before_step(named: Any) -> None:
        seen.extend(float(parameter.grad.norm()) for _, parameter in named)

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)
    assert len(seen) >= STEPS


def gradients_scaled_by_hooks(way: Way) -> None:
    """Another way to give the backbone a smaller rate."""
    model, optimizer = built()
    for parameter in model.backbone.parameters():
        parameter.register_hook(lambda gradient: 0.1 * gradient)  # type: ignore[no-untyped-call]
    way.train(model, Points(), optimizer, loss=cross_entropy)


def gradients_scaled_before_the_update(way: Way) -> None:
    model, optimizer = built()

    def before_step(named: Any) -> None:
        for name, parameter in named:
            if name.startswith("backbone"):
                parameter.grad.mul_(0.1)

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


def gradients_scaled_by_a_module(way: Way) -> None:
    model, optimizer = built()

    def scaled(_: nn.Module, given: Any, __: Any) -> Any:
        return (0.1 * given[0],)

    model.middle.register_full_backward_hook(scaled)
    way.train(model, Points(), optimizer, loss=cross_entropy)


class NewRowsOnly(nn.Module):
    """Trains only some rows of a table, by a hook that its constructor registers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(10, WIDTH), nn.Linear(WIDTH, CLASSES)
        mask = (torch.arange(WIDTH) >= WIDTH // 2)[:, None].float()
        self.first.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.first(x)))


def rows_frozen_by_a_hook(way: Way) -> None:
    torch.manual_seed(0)
    model = NewRowsOnly()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


def rows_frozen_by_a_hook_of_a_function(way: Way) -> None:
    torch.manual_seed(0)
    way.train(NewRowsOnly, Points(), lambda named: sgd([p for _, p in named]), loss=cross_entropy)


def rows_frozen_before_the_update(way: Way) -> None:
    model, optimizer = built()

    def before_step(named: Any) -> None:
        for name, parameter in named:
            if name == "backbone.0.weight":
                parameter.grad[: WIDTH // 2] = 0

    way.train(model, Points(), optimizer, loss=cross_entropy, before_step=before_step)


def variance_of_adam_logged(way: Way) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    logged: list[float] = []

    def told(step: int, loss: float) -> None:
        logged.append(sum(float(state["exp_avg_sq"].mean()) for state in optimizer.state.values()))

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def hook_of_the_optimizer_anneals_the_loss(way: Way) -> None:
    model, optimizer = built()
    annealed = {"scale": 1.0}

    def anneal(*_: Any) -> None:
        annealed["scale"] *= 0.9

    optimizer.register_step_post_hook(anneal)
    way.train(model, Points(), optimizer, loss=lambda output, batch: annealed["scale"] * cross_entropy(output, batch))


def moments_read_after_the_loop(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=cross_entropy)
    way.losses += [float(entries["momentum_buffer"].norm()) for entries in optimizer.state.values()]


def rolled_back_in_the_loop(way: Way) -> None:
    model, optimizer = built()
    best = {name: value.clone() for name, value in model.state_dict().items()}

    def before(step: int) -> None:
        if step == 2:
            model.load_state_dict(best)

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def gradients_cleared_in_the_loop(way: Way) -> None:
    model, optimizer = built()

    def told(step: int, loss: float) -> None:
        optimizer.zero_grad()
        model.zero_grad(set_to_none=True)

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def generators_seeded_in_the_loop(way: Way) -> None:
    model, optimizer = built()

    def before(step: int) -> None:
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def model_moved_in_the_loop(way: Way) -> None:
    model, optimizer = built()

    def told(step: int, loss: float) -> None:
        model.to("cpu").train()

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def layer_replaced_in_the_loop(way: Way) -> None:
    model, optimizer = built()

    def before(step: int) -> None:
        if step == 2:
            model.head = nn.Linear(WIDTH, CLASSES)

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def hook_added_in_the_loop(way: Way) -> None:
    model, optimizer = built()

    def before(step: int) -> None:
        if step == 2:
            model.head.register_forward_hook(lambda module, given, output: output * 0.5)

    way.train(model, Points(), optimizer, loss=cross_entropy, before=before)


def model_replaced_by_data_parallel(way: Way) -> None:
    model, optimizer = built()
    way.train(nn.DataParallel(model), Points(), optimizer, loss=cross_entropy)


# -- forward ------------------------------------------------------------------------------------------------------


class CountsForwards(Net):
    """Anneals by the number of its own forward passes, a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        return super().forward(x) * min(1.0, 0.5 + 0.1 * self.passes)


def forward_counts_its_passes(way: Way) -> None:
    torch.manual_seed(0)
    model = CountsForwards()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


class StepInTheBatch(Net):
    """The same by the step."""

    def forward(self, x: Tensor, labels: Tensor, step: Tensor) -> Any:  # type: ignore[override]
        scale = (0.6 + 0.1 * step).clamp(max=1.0)
        return F.cross_entropy(super().forward(x) * scale[:, None], labels)


def forward_reads_the_step(way: Way) -> None:
    torch.manual_seed(0)
    model = StepInTheBatch()
    if isinstance(way, PlainLoop):
        now = [0]

        def collate(samples: list[Any]) -> Any:
            return {**default_collate(samples), "step": torch.full((len(samples),), now[0])}

        way.train(model, Points(), sgd(model.parameters()), collate=collate, before=partial(now.__setitem__, 0))
    else:
        way.train(model, Points(), sgd(model.parameters()))


class DropsLayers(Net):
    """LayerDrop, as fairseq's first one."""

    def forward(self, x: Tensor) -> Any:
        x = self.backbone(x)
        if np.random.rand() > 0.5:
            x = self.middle(x)
        return self.head(x)


def layers_dropped_by_numpy(way: Way) -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    model = DropsLayers()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


class DropsByTensor(DropsLayers):
    """The same with torch's numbers, one for each example, as StochasticDepth does it."""

    def forward(self, x: Tensor) -> Any:
        x = self.backbone(x)
        return self.head(torch.where(torch.rand(x.shape[0], 1) > 0.5, self.middle(x), x))


def layers_dropped_by_torch(way: Way) -> None:
    torch.manual_seed(0)
    model = DropsByTensor()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


class MixesExamples(Net):
    """Mixup within forward: each example meets another one of the batch."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        other = torch.randperm(x.shape[0], device=x.device)
        output = super().forward(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(output, labels) + 0.3 * F.cross_entropy(output, labels[other])


def examples_mixed_in_forward(way: Way) -> None:
    torch.manual_seed(0)
    model = MixesExamples()
    way.train(model, Points(), sgd(model.parameters()))


class Mixed(Points):
    """Mixes each sample with another one, whose number it draws."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        other = int(torch.randint(SAMPLES, (), generator=torch.Generator().manual_seed(index)))
        one, two = super().__getitem__(index), super().__getitem__(other)
        return {"x": 0.7 * one["x"] + 0.3 * two["x"], "labels": one["labels"], "others": two["labels"]}


class OfMixed(Net):
    """The loss of mixed samples."""

    def forward(self, x: Tensor, labels: Tensor, others: Tensor) -> Any:  # type: ignore[override]
        output = super().forward(x)
        return 0.7 * F.cross_entropy(output, labels) + 0.3 * F.cross_entropy(output, others)


def examples_mixed_in_the_dataset(way: Way) -> None:
    torch.manual_seed(0)
    model = OfMixed()
    way.train(model, Mixed(), sgd(model.parameters()))


class TiesInForward(nn.Module):
    """Ties its head to its embedding whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(10, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.middle(self.embed(x)))
        return F.linear(x, self.embed.weight.t())[:, :CLASSES] + 0 * self.head(x)[:, :CLASSES]


def weights_shared_in_forward(way: Way) -> None:
    torch.manual_seed(0)
    model = TiesInForward()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


class Lazy(nn.Module):
    """Its first layer finds its size in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.LazyLinear(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.first(x)))


def lazy_layers(way: Way) -> None:
    torch.manual_seed(0)
    model = Lazy()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


def lazy_layers_after_a_first_batch(way: Way) -> None:
    torch.manual_seed(0)
    model = Lazy()
    with torch.no_grad():
        model(torch.zeros(1, 10))
    torch.manual_seed(0)
    for each in (model.first, model.head):
        each.reset_parameters()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


class ChecksValues(Net):
    """Stops at NaN, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Any:
        x = self.backbone(x)
        if torch.isnan(x).any():
            raise ValueError("NaN in the backbone")
        self.seen.append(x.mean().item())
        return self.head(self.middle(x))


def forward_checks_and_keeps_values(way: Way) -> None:
    torch.manual_seed(0)
    model = ChecksValues()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


class GradientPenalty(Net):
    """The loss has the gradient of the output by the input."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        x = x.clone().requires_grad_()
        output = super().forward(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.cross_entropy(output, labels) + 0.1 * slope.pow(2).sum(1).mean()


def gradient_penalty_in_forward(way: Way) -> None:
    torch.manual_seed(0)
    model = GradientPenalty()
    way.train(model, Points(), sgd(model.parameters()))


class Recurrent(nn.Module):
    """An LSTM over sequences of several lengths, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(2, 2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.cells(packed)[1][0][-1]


class PacksItself(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss_of(super().forward(x.view(-1, 5, 2), labels + 1), x, labels)

    def loss_of(self, found: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x + found.mean(1, keepdim=True)), labels)


class HasWhatPacks(PacksItself):
    def __init__(self) -> None:
        super().__init__()
        self.cells = Recurrent()  # type: ignore[assignment]

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss_of(self.cells(x.view(-1, 5, 2), labels + 1), x, labels)


def sequences_packed_in_forward(way: Way) -> None:
    torch.manual_seed(0)
    model = PacksItself()
    way.train(model, Points(), sgd(model.parameters()))


def sequences_packed_in_a_submodule(way: Way) -> None:
    torch.manual_seed(0)
    model = HasWhatPacks()
    way.train(model, Points(), sgd(model.parameters()))


class Penalised(Net):
    """Takes and returns tensors: the output, and the squared slope of each example."""

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        output = super().forward(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output, slope.pow(2).sum(1)


class WithPenalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Penalised()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        output, slope = self.net(x)
        return F.cross_entropy(output, labels) + 0.1 * slope.mean()


def gradient_penalty_in_a_submodule(way: Way) -> None:
    torch.manual_seed(0)
    model = WithPenalised()
    way.train(model, Points(), sgd(model.parameters()))


class Casts(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def autocast_in_forward(way: Way) -> None:
    torch.manual_seed(0)
    model = Casts()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


def autocast_around_the_loss(way: Way) -> None:
    model, optimizer = built()

    def loss(output: Tensor, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(output, batch["labels"])

    way.train(model, Points(), optimizer, loss=loss)


class Doubles(Net):
    """A model in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.double())


def model_in_double_precision(way: Way) -> None:
    torch.manual_seed(0)
    model = Doubles()
    way.train(model, Points(), sgd(model.parameters()), loss=cross_entropy)


# -- losses -------------------------------------------------------------------------------------------------------


class WarmingUp:
    """A loss that counts its calls, and grows with them or not."""

    def __init__(self, calls: int) -> None:
        self.calls, self.warm = 0, calls

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, batch["labels"]) * (1 + (self.calls > self.warm > 0))


def loss_that_counts(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=WarmingUp(2000))


def loss_that_counts_for_a_log(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=WarmingUp(0))


class Sure(Net):
    """A model that keeps how sure it is."""

    entropy: Any = None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        self.entropy = entropy_of(output).mean().detach()
        return output


def entropy_of(output: Tensor) -> Tensor:
    return -(output.softmax(-1) * output.log_softmax(-1)).sum(-1)


def rate_of_what_forward_keeps(way: Way) -> None:
    model = Sure()
    optimizer = sgd(model.parameters())

    def told(step: int, loss: float) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * float(model.entropy)

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told)


def rate_of_a_metric(way: Way) -> None:
    model, optimizer = built()

    def entropy(output: Any, batch: Any) -> dict[str, Tensor]:
        return {"entropy": entropy_of(output).sum()}

    def told(step: int, loss: float) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * way.metrics["entropy"] / BATCH

    way.train(model, Points(), optimizer, loss=cross_entropy, told=told, metrics=entropy)


def loss_of_the_step(way: Way) -> None:
    model, optimizer = built()
    at = [0]

    def over_step(output: Tensor, batch: Any) -> Any:
        return (F.cross_entropy(output, batch["labels"], reduction="none") * (1 + (batch["step"] > 1))).mean()

    def in_loop(output: Tensor, batch: Any) -> Any:
        return F.cross_entropy(output, batch["labels"]) * (1 + (at[0] > 1))

    is_plain = isinstance(way, PlainLoop)
    way.train(model, Points(), optimizer, loss=in_loop if is_plain else over_step, before=partial(at.__setitem__, 0))


def loss_of_one_number_of_the_step(way: Way) -> None:
    model, optimizer = built()
    at, temperatures = [0], torch.linspace(1.0, 2.0, STEPS)

    def of(step: Any, output: Tensor, batch: Any) -> Any:
        return F.cross_entropy(output / temperatures[step], batch["labels"]) * (1 + 0.1 * step)

    if isinstance(way, PlainLoop):
        before = partial(at.__setitem__, 0)
        way.train(model, Points(), optimizer, loss=lambda output, batch: of(at[0], output, batch), before=before)
    else:
        way.train(model, Points(), optimizer, loss=lambda output, batch: of(batch["step"][0], output, batch))


class Centred(nn.Module):
    """A loss that remembers the mean of what it gets, as DINO's does."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, CLASSES))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(output - self.center, labels)
        with torch.no_grad():
            self.center = self.center * 0.9 + output.mean(0, keepdim=True) * 0.1
        return loss


class Trained(Centred):
    """One with a parameter, as CurricularFace is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        return super().forward(output * self.scale, labels)


def centre_in_a_loss_that_trains(way: Way) -> None:
    model, loss = built()[0], Trained()
    way.train(model, Points(), sgd([*model.parameters(), *loss.parameters()]), loss=loss)


class NetAndLoss(nn.Module):
    """Both in one module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = net, Centred()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.net(x), labels)


def centre_in_the_loss(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=Centred())


def centre_in_the_model(way: Way) -> None:
    model, optimizer = built()
    way.train(NetAndLoss(model), Points(), optimizer)


def smoothing_of_a_loss_module_changes(way: Way) -> None:
    model, optimizer = built()
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)

    def before(step: int) -> None:
        loss.label_smoothing = 0.2 * (1 - step / STEPS)

    way.train(model, Points(), optimizer, loss=loss, before=before)


def class_weights_renewed_in_place(way: Way) -> None:
    model, optimizer = built()
    weights = torch.ones(CLASSES)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (F.cross_entropy(output, batch["labels"], reduction="none") * weights[batch["labels"]]).mean()

    def before(step: int) -> None:
        weights[0] = 1.0 + step

    way.train(model, Points(), optimizer, loss=loss, before=before)


def loss_is_a_partial(way: Way) -> None:
    model, optimizer = built()
    smooth = partial(F.cross_entropy, label_smoothing=0.1)
    way.train(model, Points(), optimizer, loss=lambda output, batch: smooth(output, batch["labels"]))


def focal_loss(way: Way) -> None:
    model, optimizer = built()

    def loss(output: Tensor, batch: Any) -> Tensor:
        each = F.cross_entropy(output, batch["labels"], reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    way.train(model, Points(), optimizer, loss=loss)


def loss_without_autocast(way: Way) -> None:
    """Keep the loss out of an autocast region that a script may have around it."""
    model, optimizer = built()

    def loss(output: Tensor, batch: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            with torch.no_grad():
                known = batch["labels"] > 0
            each = F.cross_entropy(output.float(), batch["labels"], reduction="none")
            found: Tensor = (each * known).sum() / known.sum()
            return found

    way.train(model, Points(), optimizer, loss=loss)


def summed_loss(way: Way) -> None:
    model, optimizer = built()
    optimizer.param_groups[0]["lr"] = 0.02
    way.train(model, Points(), optimizer, loss=nn.CrossEntropyLoss(reduction="sum"))


def dice_over_the_batch(way: Way) -> None:
    model, optimizer = built()

    def loss(output: Tensor, batch: Any) -> Tensor:
        probability, truth = output.softmax(1), F.one_hot(batch["labels"], CLASSES).float()
        return 1 - (2 * (probability * truth).sum(0) / (probability + truth).sum(0).clamp(min=1e-3)).mean()

    way.train(model, Points(), optimizer, loss=loss)


def hardest(output: Tensor, batch: Any) -> Tensor:
    losses = F.cross_entropy(output, batch["labels"], reduction="none")
    return losses.topk(5).values.mean()


def hardest_of_the_batch(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=hardest)


def hardest_within_micro_batches(way: Way) -> None:
    model, optimizer = built()
    loss = hardest if isinstance(way, PlainLoop) else varuna.Loss(hardest, per_micro_batch=True)
    way.train(model, Points(), optimizer, loss=loss, micro_batch=BATCH)


def dice_within_micro_batches(way: Way) -> None:
    model, optimizer = built()

    def loss(output: Tensor, batch: Any) -> Tensor:
        probability, truth = output.softmax(1), F.one_hot(batch["labels"], CLASSES).float()
        return 1 - (2 * (probability * truth).sum(0) / (probability + truth).sum(0).clamp(min=1e-3)).mean()

    given: Any = loss if isinstance(way, PlainLoop) else varuna.Loss(loss, per_micro_batch=True)
    way.train(model, Points(), optimizer, loss=given, micro_batch=4)


# -- data ---------------------------------------------------------------------------------------------------------


def pairs() -> TensorDataset:
    samples = [Points()[index] for index in range(SAMPLES)]
    return TensorDataset(
        torch.stack([each["x"] for each in samples]), torch.stack([each["labels"] for each in samples])
    )


def tensor_dataset(way: Way) -> None:
    model, optimizer = built()
    way.train(model, pairs(), optimizer, loss=nn.CrossEntropyLoss())


class Growing(Points):
    """Samples are added while it trains, as in active learning."""

    def __init__(self) -> None:
        self.chosen = list(range(SAMPLES))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(self.chosen[index])


def samples_added_in_the_loop(way: Way) -> None:
    model, optimizer = built()
    dataset = Growing()

    def before(step: int) -> None:
        if step == 2:
            dataset.chosen.extend(range(SAMPLES, 2 * SAMPLES))

    way.train(model, dataset, optimizer, loss=cross_entropy, before=before)


def samples_shuffled_in_the_loop(way: Way) -> None:
    model, optimizer = built()
    dataset = Growing()

    def before(step: int) -> None:
        random.Random(step).shuffle(dataset.chosen)

    way.train(model, dataset, optimizer, loss=cross_entropy, before=before)


def data_loader_as_dataset(way: Way) -> None:
    model, optimizer = built()
    way.train(model, DataLoader(pairs(), batch_size=BATCH, shuffle=True), optimizer, loss=nn.CrossEntropyLoss())


class Stream(IterableDataset[Any]):
    """Samples one after the other."""

    def __iter__(self) -> Any:
        return (Points()[index] for index in range(SAMPLES))


def iterable_dataset(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Stream(), optimizer, loss=cross_entropy)


class Weighted:
    """Draws the samples of each position with weights, as ``WeightedRandomSampler`` does for a whole epoch."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = torch.tensor(weights)

    def __getitem__(self, position: int) -> Any:
        drawn = torch.multinomial(self.weights, 1, generator=torch.Generator().manual_seed(position))
        return Points()[int(drawn)]


class FeaturesWithoutGradient(Net):
    """A backbone that is not frozen, and gets no gradient."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(self.middle(features))


def backbone_under_no_grad(way: Way) -> None:
    torch.manual_seed(0)
    model = FeaturesWithoutGradient()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    way.train(model, Points(), optimizer, loss=cross_entropy)


class Augmented(Points):
    """Adds noise to each sample, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how, self.reads, self.kept = how, 0, dict[int, Tensor]()
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample, x = super().__getitem__(index), torch.zeros(10)
        if self.how == "counts":
            self.reads += 1
            x += self.reads // 1000
        elif self.how == "own generator":
            x += torch.randn(10, generator=self.generator)
        elif self.how == "keeps":
            if index not in self.kept:
                self.kept[index] = torch.randn(10)
            x += self.kept[index]
        else:
            x += torch.randn(10, generator=torch.Generator().manual_seed(index))
        return {**sample, "x": sample["x"] + x}


def centred(samples: list[Any]) -> Any:
    """A collate that takes the mean of the batch away."""
    batch = default_collate(samples)
    return {**batch, "x": batch["x"] - batch["x"].mean(0)}


def batch_centred_in_collate(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Points(), optimizer, loss=cross_entropy, collate=centred)


def micro_batch_centred_in_collate(way: Way) -> None:
    model, optimizer = built()
    loss: Any = cross_entropy if isinstance(way, PlainLoop) else varuna.Loss(cross_entropy, per_micro_batch=True)
    way.train(model, Points(), optimizer, loss=loss, collate=centred, micro_batch=4)


def dataset_augmented(kind: str) -> Script:
    """Return a script whose dataset adds noise in the named way."""

    def script(way: Way) -> None:
        model, optimizer = built()
        way.train(model, Augmented(kind), optimizer, loss=cross_entropy)

    script.__name__ = f"dataset_augmented_{kind.replace(' ', '_')}"
    return script


dataset_seeded_by_the_index = dataset_augmented("by index")


WEIGHTS = [1.0 + index % 3 for index in range(SAMPLES)]


def weighted_sampler_in_a_loader(way: Way) -> None:
    model, optimizer = built()
    loader = DataLoader(pairs(), batch_size=BATCH, sampler=WeightedRandomSampler(WEIGHTS, SAMPLES))
    way.train(model, loader, optimizer, loss=nn.CrossEntropyLoss())


def weighted_by_position(way: Way) -> None:
    model, optimizer = built()
    if isinstance(way, PlainLoop):
        weighted = Weighted(WEIGHTS)
        position = iter(range(STEPS * BATCH))

        class Following:
            def __len__(self) -> int:
                return SAMPLES

            def __getitem__(self, index: int) -> Any:
                return weighted[next(position)]

        way.train(model, Following(), optimizer, loss=cross_entropy)
    else:
        way.train(model, Weighted(WEIGHTS), optimizer, loss=cross_entropy)


class Named(Points):
    """Each sample has the name of its file."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "file": f"{index}.png"}


def samples_with_texts(way: Way) -> None:
    model, optimizer = built()
    way.train(model, Named(), optimizer, loss=cross_entropy)


class InEpochs(Points):
    """Samples that are drawn anew in each pass."""

    epoch = 0

    def __len__(self) -> int:
        return 2 * BATCH

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index + 100 * self.epoch)


def epoch_of_the_dataset_set_in_the_loop(way: Way) -> None:
    model, optimizer = built()
    dataset = InEpochs()

    def before(step: int) -> None:
        if step % 2 == 0:
            dataset.set_epoch(step // 2)

    way.train(model, dataset, optimizer, loss=cross_entropy, before=before)


def told_by_readers(way: Way, in_the_loop: Script, dataset: Points) -> None:
    """Leave it to those who read; the plain loop says it itself."""
    if isinstance(way, PlainLoop):
        in_the_loop(way)
    else:
        model, optimizer = built()
        way.train(model, dataset, optimizer, loss=cross_entropy)


def epoch_told_by_readers(way: Way) -> None:
    told_by_readers(way, epoch_of_the_dataset_set_in_the_loop, InEpochs())


class Harder(Points):
    """A curriculum."""

    level = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__((1 + self.level) * index)


class HarderBySteps(Harder):
    """The same, told by those who read."""

    def set_step(self, step: int) -> None:
        self.level = step // 2


def level_of_the_dataset_rises(way: Way) -> None:
    model, optimizer = built()
    dataset = Harder()

    def before(step: int) -> None:
        dataset.level = step // 2

    way.train(model, dataset, optimizer, loss=cross_entropy, before=before)


def level_in_a_file(way: Way) -> None:
    model, optimizer = built()
    with tempfile.TemporaryDirectory() as folder:
        level = Path(folder, "level.txt")

        class OfFile(Harder):
            def __getitem__(self, index: int) -> dict[str, Any]:
                self.level = int(level.read_text())
                return super().__getitem__(index)

        def told(step: int, loss: float) -> None:
            level.write_text(str((step + 1) // 2))

        level.write_text("0")
        way.train(model, OfFile(), optimizer, loss=cross_entropy, told=told)


def loss_scaled_by_a_file(way: Way) -> None:
    model, optimizer = built()
    with tempfile.TemporaryDirectory() as folder:
        scale = Path(folder, "scale.txt")

        def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
            return cross_entropy(output, batch) * float(scale.read_text())

        def told(step: int, loss: float) -> None:
            scale.write_text(str(0.9 ** (step + 1)))

        scale.write_text("1")
        way.train(model, Points(), optimizer, loss=loss, told=told)


def level_told_by_readers(way: Way) -> None:
    told_by_readers(way, level_of_the_dataset_rises, HarderBySteps())


class OfNumpy(Points):
    """Double precision, as numpy makes it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"x": sample["x"].double().numpy(), "labels": int(sample["labels"])}


def samples_of_numpy_in_double(way: Way) -> None:
    model, optimizer = built()
    way.train(model, OfNumpy(), optimizer, loss=cross_entropy)


def collate_that_makes_floats(way: Way) -> None:
    model, optimizer = built()

    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return {"x": batch["x"].float(), "labels": batch["labels"]}

    way.train(model, OfNumpy(), optimizer, loss=cross_entropy, collate=collate)


SITUATIONS = [
    # the loop and the optimizer
    Situation("weight decay that follows a schedule", weight_decay_follows_a_cosine, ""),
    Situation("ReduceLROnPlateau, stepped in the loop", plateau_scheduler_in_the_loop, ""),
    Situation("momentum that warms up", momentum_warms_up, ""),
    Situation(
        "rates by an object around the optimizer, which counts its steps (Noam)",
        rates_that_count_by_themselves,
        "k2-fsa/snowfall#110",
    ),
    Situation("a batch that grows during warm-up", batch_that_grows, "NVIDIA/Megatron-LM#1109"),
    Situation("a learning rate that is a tensor", rate_as_a_tensor, ""),
    Situation("`maximize=True`, `foreach=True`", gradients_maximised, ""),
    Situation(
        "`add_param_group` when layers unfreeze",
        group_added_when_unfreezing,
        "Lightning-AI/pytorch-lightning#514",
        r"groups cannot be added in the loop.*frozen=",
        group_frozen_until_it_begins,
    ),
    Situation(
        "unfreezing or freezing, `requires_grad_()` in the loop",
        layers_unfrozen_in_the_loop,
        "facebookresearch/detectron2#2486",
        r"changed requires_grad of backbone\.0\.weight.*frozen=lambda name, step",
        layers_frozen_by_step,
    ),
    Situation("a layer drawn for each step (LISA)", layers_drawn_for_each_step, "OptimalScale/LMFlow#726"),
    Situation("`optimizer.load_state_dict()` before the loop", optimizer_that_goes_on, "NM512/dreamerv3-torch#38"),
    Situation("`p.grad = ...` in `before_step=`", gradients_replaced_before_the_update, ""),
    Situation(
        "an optimizer that keeps `p.grad` itself for the next step",
        gradients_remembered_by_the_optimizer,
        "kozistr/pytorch_optimizer#98",
    ),
    Situation("`p.grad = None` in some steps, in `before_step=`", small_gradients_dropped_before_the_update, ""),
    Situation(
        "clearing the optimizer's state in the loop",
        optimizer_state_cleared,
        "pytorch/pytorch#37410",
        r"asked for the state of the optimizer \(situations\.py:\d+\).*train in two runs",
    ),
    Situation(
        "logging values of the optimizer's state",
        variance_of_adam_logged,
        "pytorch/pytorch#37410",
        r"asked for the state of the optimizer \(situations\.py:\d+\)",
    ),
    Situation(
        "a hook of the optimizer that writes what a loss or a dataset reads",
        hook_of_the_optimizer_anneals_the_loss,
        "",
        r"a hook or a function in optimizer= writes annealed\['scale'\], which loss= reads.*batch\[\"step\"\] in loss=",
        loss_of_the_step,
    ),
    Situation(
        "the optimizer's state after the loop",
        moments_read_after_the_loop,
        "",
        r"asked for the state of the optimizer \(situations\.py:\d+\).*after the loop.*checkpoints=",
    ),
    Situation("LBFGS", closure_optimizer, "", r"a closure that runs the model again", fails_plainly=True),
    Situation(
        "SparseAdam, for `nn.Embedding(sparse=True)`",
        sparse_adam,
        "",
        r"SparseAdam, which wants sparse gradients.*torch\.optim\.Adam",
        adam_for_a_table,
    ),
    Situation(
        "SAM: two passes a step",
        two_passes,
        "davda54/sam#66",
        r"a closure that runs the model again",
        fails_plainly=True,
    ),
    Situation(
        "an optimizer from `accelerator.prepare`",
        prepared_optimizer,
        "",
        r"optimizer= is a Prepared around a SGD, as accelerator\.prepare\(\) makes it.*pass the SGD",
        optimizer_as_built,
    ),
    Situation(
        "an optimizer around another one (Lookahead)",
        optimizer_in_a_wrapper,
        "",
        r"SlowWeights around a SGD.*optimizer=lambda named: SlowWeights\(SGD\(",
        function_of_a_wrapper,
    ),
    Situation(
        "two optimizers that are built already",
        two_optimizers_in_a_list,
        "",
        r"optimizer= is a list of what is built already\. Pass a function that returns them",
        fails_plainly=True,
    ),
    Situation(
        "freezing by `p.grad = None` in `before_step=`", frozen_by_setting_gradients_to_none, "allenai/allennlp#4502"
    ),
    Situation("adaptive gradient clipping in `before_step=`", gradients_clipped_adaptively, ""),
    Situation("`zero_grad()` left in the loop", gradients_cleared_in_the_loop, ""),
    # the loop and the model
    Situation(
        "a dropout or drop path rate that follows a schedule",
        dropout_follows_a_schedule,
        "whai362/PVT#2",
        r"changed backbone\.2\.p of the model: it was 0\.5.*a parameter of forward\(\) that is named step",
        forward_reads_the_step,
    ),
    Situation(
        "a temperature in a buffer that the loop writes",
        temperature_in_a_buffer,
        "ethanfetaya/NRI#14",
        r"wrote to temperature.*after_step=",
        temperature_after_each_step,
    ),
    Situation(
        "keeping the best model by `copy.deepcopy(model)`",
        best_model_kept_by_deepcopy,
        "pytorch/tutorials#188",
        r"read backbone\.0\.weight.*trainer\.export\(path\)\. \(situations\.py:\d+\)",
    ),
    Situation(
        "going back to earlier weights by `load_state_dict` in the loop",
        rolled_back_in_the_loop,
        "WenjieDu/PyPOTS#667",
        r"changed backbone\.0\.weight of the model",
    ),
    Situation(
        "logging norms of weights",
        norms_of_weights_logged,
        "wandb/wandb#1074",
        r"read backbone\.0\.weight.*before_step=",
    ),
    Situation("counting parameters in the loop", parameters_counted_in_the_loop, ""),
    Situation("seeding generators in the loop", generators_seeded_in_the_loop, ""),
    Situation(
        "`wandb.watch(model)`",
        gradients_watched_by_hooks,
        "wandb/wandb#1594",
        r"hooks on gradients \(Parameter\.register_hook on backbone\.0\.weight.*no hook would be called.*wandb\.watch",
        norms_before_the_update,
    ),
    Situation(
        "a smaller rate by `register_hook`",
        gradients_scaled_by_hooks,
        "facebookresearch/detectron2#2486",
        r"no hook would be called.*before_step=",
        gradients_scaled_before_the_update,
    ),
    Situation(
        "a smaller rate by `register_full_backward_hook`",
        gradients_scaled_by_a_module,
        "",
        r"register_full_backward_hook on middle.*before_step=",
        gradients_scaled_before_the_update,
    ),
    Situation(
        "training only new rows of a table, by a hook",
        rows_frozen_by_a_hook,
        "",
        r"Parameter\.register_hook on first\.weight.*before_step=",
        rows_frozen_before_the_update,
    ),
    Situation(
        "the same, and the model is a function",
        rows_frozen_by_a_hook_of_a_function,
        "",
        r"Parameter\.register_hook on first\.weight.*before_step",
        rows_frozen_before_the_update,
    ),
    Situation(
        "a forward hook that the loop adds",
        hook_added_in_the_loop,
        "meta-pytorch/torchtune#1430",
        r"changed the hooks of head of the model",
    ),
    Situation(
        "a layer that the loop replaces",
        layer_replaced_in_the_loop,
        "",
        r"changed head of the model",
    ),
    Situation(
        "`nn.DataParallel(model)`", model_replaced_by_data_parallel, "wandb/wandb#1819", r"Pass the module inside"
    ),
    # forward
    Situation(
        "forward counts its own passes",
        forward_counts_its_passes,
        "",
        r"a number that forward\(\) itself changes: passes",
        forward_reads_the_step,
    ),
    Situation("a loss with parameters that replaces its buffer (CurricularFace)", centre_in_a_loss_that_trains, ""),
    Situation(
        "a loss module that writes its own buffer (DINO's centre)",
        centre_in_the_loss,
        "",
        r"loss= writes center of Centred for the next step.*a module that has the model and the loss",
        centre_in_the_model,
    ),
    Situation('a table or a factor by `batch["step"][0]`', loss_of_one_number_of_the_step, ""),
    Situation("forward reads the step", forward_reads_the_step, "PlaytikaOSS/pybandits#137"),
    Situation(
        "LayerDrop with numpy's numbers",
        layers_dropped_by_numpy,
        "facebookresearch/fairseq2#484",
        r"draws from NumPy's random at .*situations\.py:\d+.*torch\.where",
        layers_dropped_by_torch,
    ),
    Situation(
        "mixup inside of forward",
        examples_mixed_in_forward,
        "mosaicml/composer#875",
        r"takes examples by their place in the batch at .*situations\.py:\d+.*Mixup and cutmix: let dataset\[i\] draw",
        examples_mixed_in_the_dataset,
    ),
    Situation("layers under `torch.no_grad()` in forward, with weight decay", backbone_under_no_grad, ""),
    Situation("weights that forward uses twice", weights_shared_in_forward, ""),
    Situation(
        "`nn.LazyLinear`",
        lazy_layers,
        "",
        r"first\.weight has no shape yet.*let the model run once",
        lazy_layers_after_a_first_batch,
    ),
    Situation("forward stops at NaN and keeps what it saw", forward_checks_and_keeps_values, ""),
    Situation(
        "`pack_padded_sequence` in the model's own forward",
        sequences_packed_in_forward,
        "",
        r"cannot be captured at .*situations\.py:\d+.*move what fails into a submodule that takes and returns tensors",
        sequences_packed_in_a_submodule,
    ),
    Situation(
        "a gradient penalty inside of forward",
        gradient_penalty_in_forward,
        "",
        r"forward\(\) computes gradients itself at .*situations\.py:\d+",
        gradient_penalty_in_a_submodule,
    ),
    Situation(
        "`torch.autocast` in forward",
        autocast_in_forward,
        "",
        r"leave torch\.autocast out of forward\(\) and loss=, and pass precision=\"bf16\"",
        optimizer_as_built,
    ),
    Situation(
        "`torch.autocast` around the loss",
        autocast_around_the_loss,
        "",
        r"situations\.py:\d+.*leave torch\.autocast out of forward\(\) and loss=",
        optimizer_as_built,
    ),
    Situation(
        "a model in double precision",
        model_in_double_precision,
        "",
        r"is float64.*Build the model in float32",
        tensor_dataset,
    ),
    # losses
    Situation(
        "a loss that changes with a count of its calls",
        loss_that_counts,
        "",
        r"a number that forward\(\) itself changes: loss=\.calls.*batch\[\"step\"\] in loss=",
        loss_of_the_step,
    ),
    Situation(
        "a rate that follows what forward or the loss keeps",
        rate_of_what_forward_keeps,
        "",
        r"asked for model\.entropy, which forward\(\) writes \(situations\.py:\d+\).*metrics=.*step\.metrics",
        rate_of_a_metric,
    ),
    Situation("a loss that counts its calls for a log", loss_that_counts_for_a_log, ""),
    Situation(
        "label smoothing that the loop changes",
        smoothing_of_a_loss_module_changes,
        "omihub777/ViT-CIFAR#2",
        r"changed label_smoothing of a module that loss= uses: it was 0\.2.*batch\[\"step\"\]",
    ),
    Situation(
        "class weights that the loop renews in place",
        class_weights_renewed_in_place,
        "richardaecn/class-balanced-loss#17",
        r"changed weights, which loss= reads.*batch\[\"step\"\]",
    ),
    Situation("a loss that is a partial", loss_is_a_partial, ""),
    Situation("focal loss", focal_loss, ""),
    Situation("a loss in `torch.autocast(..., enabled=False)`", loss_without_autocast, ""),
    Situation("a summed loss", summed_loss, ""),
    Situation(
        "hard-example mining: the k largest losses of a batch",
        hardest_of_the_batch,
        "",
        r"k not in range.*of three samples.*per_micro_batch=True",
        hardest_within_micro_batches,
    ),
    Situation(
        "Dice loss over the batch",
        dice_over_the_batch,
        "",
        r"not composed of the losses of its examples.*micro_batch=.*per_micro_batch=True",
        dice_within_micro_batches,
    ),
    # data
    Situation(
        "`dataset.set_epoch(n)` in the loop",
        epoch_of_the_dataset_set_in_the_loop,
        "huggingface/datasets#6673",
        r"called set_epoch\(\) of the dataset \(situations\.py:\d+\).*Leave it out",
        epoch_told_by_readers,
    ),
    Situation(
        "`dataset.level = ...`, a curriculum in the loop",
        level_of_the_dataset_rises,
        "pytorch/pytorch#97326",
        r"changed dataset\.level, which dataset reads.*set_step\(step\)",
        level_told_by_readers,
    ),
    Situation(
        "a file that the loop writes and `dataset[i]` reads; a database, an event, a queue",
        level_in_a_file,
        "",
        r"dataset\[\d+\] became another sample \(situations\.py:\d+\).*a file.*set_step\(step\)",
        level_told_by_readers,
    ),
    Situation(
        "a file that the loop writes and `loss=` or `forward()` reads",
        loss_scaled_by_a_file,
        "",
        r"scale\.txt changed.*situations\.py:\d+ reads it.*batch\[\"step\"\] in loss=",
        loss_of_the_step,
    ),
    Situation("`TensorDataset`", tensor_dataset, ""),
    Situation(
        "a `DataLoader` as dataset",
        data_loader_as_dataset,
        "huggingface/accelerate#2865",
        r"Pass loader\.dataset",
        tensor_dataset,
        fails_plainly=True,
    ),
    Situation(
        "a `collate=` that computes over the batch",
        batch_centred_in_collate,
        "",
        r"collate= makes something else of a sample when others are beside it.*per_micro_batch=True",
        micro_batch_centred_in_collate,
    ),
    Situation(
        "a count of reads that changes samples",
        dataset_augmented("counts"),
        "",
        r"is another sample when dataset\.reads, which counts",
        dataset_seeded_by_the_index,
    ),
    Situation(
        "a generator that the dataset keeps",
        dataset_augmented("own generator"),
        "",
        r"the dataset is random.*separate generators",
        dataset_seeded_by_the_index,
    ),
    Situation(
        "what the dataset has drawn, kept in a cache",
        dataset_augmented("keeps"),
        "",
        r"keeps what it has drawn.*random\.Random\(index\)",
        dataset_seeded_by_the_index,
    ),
    Situation(
        "`WeightedRandomSampler`",
        weighted_sampler_in_a_loader,
        "open-mmlab/mmsegmentation#3104",
        r"WeightedRandomSampler would not be asked.*without __len__",
        weighted_by_position,
        fails_plainly=True,
    ),
    Situation(
        "an `IterableDataset`",
        iterable_dataset,
        "",
        r"cannot be indexed.*map-style",
        tensor_dataset,
        fails_plainly=True,
    ),
    Situation(
        "samples that the loop adds",
        samples_added_in_the_loop,
        "pytorch/pytorch#97326",
        r"changed dataset\.chosen, which dataset reads.*dataset\[position\]",
        weighted_by_position,
    ),
    Situation(
        "samples that the loop shuffles",
        samples_shuffled_in_the_loop,
        "huggingface/datasets#6673",
        r"changed dataset\.chosen, which dataset reads",
        tensor_dataset,
    ),
    Situation("samples with texts", samples_with_texts, ""),
    Situation(
        "samples of numpy in double precision",
        samples_of_numpy_in_double,
        "",
        r"mat1 and mat2 must have the same dtype",
        collate_that_makes_floats,
        fails_plainly=True,
    ),
]
"""Further situations are in the tests of each kind: test_border, test_updates, test_after_step and others."""
