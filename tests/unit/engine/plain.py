"""The plain eager loop that a user would write, for any job of these tests: nothing of the engine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.depth import by_depth
from varuna.core.precision import LossScale
from varuna.data import sample_index
from varuna.engine.stage.precision import DTYPES

if TYPE_CHECKING:
    from tests.unit.engine.ranks import Setup

Curve = list[tuple[float, float]]
"""(loss, gradient norm) of each step"""


@dataclass
class Trained:
    """The results of a plain loop."""

    curve: Curve = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """steps whose fp16 gradients overflowed"""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def examples(batch: Mapping[str, Tensor]) -> float:
    """Weigh a micro-batch by its examples."""
    return float(next(iter(batch.values())).shape[0])


def targets(batch: Mapping[str, Tensor]) -> float:
    """Weigh a micro-batch by its targets."""
    return float((batch["labels"] != -100).sum())


def shifted_targets(batch: Mapping[str, Tensor]) -> float:
    """The same, for models of transformers: they predict the next token."""
    return float((batch["labels"][:, 1:] != -100).sum())


def train_plainly(
    job: "Setup",
    steps: int = by_depth(2, 4),
    *,
    whole_batch: bool = True,
    weigh: Callable[[Mapping[str, Tensor]], float] = examples,
    scale: LossScale | None = None,
    observe: Callable[[nn.Module, float], object] = lambda model, loss: None,
) -> Trained:
    """Train a job in one process; parameters stay in their own dtype, and the model computes in the job's.

    Args:
        job: what is trained.
        steps: how many.
        whole_batch: the loss is that of the whole batch; else the weighted mean of those of its micro-batches.
        weigh: the weight of a micro-batch.
        scale: of the loss, at first; steps that overflow are skipped.
        observe: is given the model and the loss after each update.
    """
    torch.manual_seed(job.seed)
    model, dtype = job.build().train(), DTYPES[job.precision]
    computing = model if dtype is torch.float32 else job.build().train().to(dtype)
    built = job.optimizer(list(model.named_parameters()))
    optimizers = built if isinstance(built, list) else [built]
    scheduler = job.scheduler(optimizers[0]) if job.scheduler else None
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    pairs = [(p, c) for p, c in zip(model.parameters(), computing.parameters(), strict=True) if p.requires_grad]
    found, at_once = Trained(), job.global_batch if whole_batch else job.micro_batch
    for step in range(steps):
        with torch.no_grad():
            for parameter, copy in pairs:
                if copy is not parameter:
                    copy.copy_(parameter)
        factor = scale.value / job.unit if scale else 1.0
        sums: list[Tensor | None] = [None] * len(pairs)
        lost = weights = 0.0
        end = (step + 1) * job.global_batch
        for first in range(step * job.global_batch, end, at_once):
            batch = _batch(job, range(first, min(first + at_once, end)))
            if not (weight := weigh(batch)):
                continue
            output = computing(**batch)
            loss = getattr(output, "loss", output)
            computing.zero_grad()
            (loss * (weight * factor)).backward()
            sums = [_added(total, copy.grad) for total, (_, copy) in zip(sums, pairs, strict=True)]
            lost, weights = lost + float(loss.detach()) * weight, weights + weight
        means = [None if each is None else each / weights / factor for each in sums]
        means = [None if _is_frozen(job, name, step) else each for name, each in zip(names, means, strict=True)]
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(each) for each in means if each is not None])
        )
        for (parameter, _), gradient in zip(pairs, means, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), math.inf if job.clip is None else job.clip, norm)
        if job.before_step is not None:
            job.before_step(list(model.named_parameters()))
        overflows = scale is not None and not torch.isfinite(norm)
        if overflows:
            found.skipped.append(step)
        else:
            for each in optimizers:
                each.step()
        if scheduler is not None:
            scheduler.step()
        if scale is not None:
            scale = scale.after(overflows)
        observe(model, lost / weights)
        found.curve.append((lost / weights, float(norm)))
    found.parameters = {name: value.detach() for name, value in model.named_parameters()}
    found.buffers = dict(model.named_buffers())
    return found


def _is_frozen(job: "Setup", name: str, step: int) -> bool:
    return job.frozen is not None and job.frozen(name, step)


def _batch(job: "Setup", positions: range) -> dict[str, Tensor]:
    samples = [job.dataset[sample_index(p, size=len(job.dataset), seed=job.seed)] for p in positions]
    collated: dict[str, Any] = (
        job.collate(samples) if job.collate else {key: torch.stack([s[key] for s in samples]) for key in samples[0]}
    )
    return collated


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Sums of half precision are those of fp32."""
    if gradient is None:
        return total
    wide = gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
    return wide if total is None else total + wide


def reference(job: "Setup", steps: int = by_depth(2, 4), *, whole_batch: bool = True) -> Curve:
    """Return losses and gradient norms of the plain loop."""
    return train_plainly(job, steps, whole_batch=whole_batch).curve


def worst(one: Curve, other: Curve) -> float:
    """Largest relative difference of two curves."""
    assert len(one) == len(other)
    return max(abs(a - b) / abs(b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of a parameter, relative to its largest element."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Compare bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
