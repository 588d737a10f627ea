"""Models whose forward writes what the next step reads, and what plain PyTorch makes of them."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.engine.ranks import Setup
from varuna.data import sample_index

GLOBAL, MICRO, STEPS = 11, 3, 4


class Points:
    """Points of space, far from normal."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(6, generator=torch.Generator().manual_seed(index)) * (1 + index % 3) + index % 5}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1, momentum=0.9)


def mlp(*sizes: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers)


class Centred(nn.Module):
    """DINO: outputs of a teacher are centred by a running mean, in place or by a new tensor."""

    def __init__(self, *, replaced: bool = False) -> None:
        super().__init__()
        self.replaced = replaced
        self.student, self.teacher = mlp(6, 8, 8, 5), mlp(6, 8, 8, 5).requires_grad_(False)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(1, 5))

    def forward(self, x: Tensor) -> Any:
        crops = [x, x * 0.9]
        with torch.no_grad():
            out = torch.cat([self.teacher(crop) for crop in crops])
            goal = ((out - self.center) / 0.3).softmax(-1).chunk(2)
            if self.replaced:
                self.center = self.center * 0.7 + out.mean(0, keepdim=True) * 0.3
            else:
                self.center.mul_(0.7).add_(out.mean(0), alpha=0.3)
        views = [self.student(crop) for crop in crops]
        return (
            -(goal[0] * views[1].log_softmax(-1)).sum(-1).mean() - (goal[1] * views[0].log_softmax(-1)).sum(-1).mean()
        )


class Codebook(nn.Module):
    """VQ-VAE: the codebook follows what is assigned to its codes, with smoothed counts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(6, 8, 4), nn.Sequential(mlp(4, 8), nn.Linear(8, 6))
        book = torch.randn(7, 4)
        self.book: Tensor
        self.counts: Tensor
        self.sums: Tensor
        self.register_buffer("book", book)
        self.register_buffer("counts", torch.ones(7))
        self.register_buffer("sums", book.clone())

    def forward(self, x: Tensor) -> Any:
        z = self.encoder(x)
        codes = (z.pow(2).sum(1, keepdim=True) - 2 * z @ self.book.t() + self.book.pow(2).sum(1)).argmin(1)
        found = F.embedding(codes, self.book)
        with torch.no_grad():
            hot = F.one_hot(codes, 7).to(z.dtype)
            self.counts.mul_(0.8).add_(hot.sum(0), alpha=0.2)
            self.sums.mul_(0.8).add_(hot.t() @ z, alpha=0.2)
            total = self.counts.sum()
            smoothed = (self.counts + 1e-5) / (total + 7e-5) * total
            self.book.copy_(self.sums / smoothed[:, None])
        return F.mse_loss(self.decoder(z + (found - z).detach()), x) + 0.25 * F.mse_loss(z, found)


class Queued(nn.Module):
    """MoCo: the newest outputs of the batch push the oldest out of a queue of negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 8, 8, 4)
        self.queue: Tensor
        self.register_buffer("queue", torch.randn(16, 4))

    def forward(self, x: Tensor) -> Any:
        keys = self.net(x)
        loss = (keys @ self.queue.clone().t()).exp().sum(1).log().mean()
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys, self.queue])[:16])
        return loss


class Spectral(nn.Module):
    """Spectral normalisation: each forward makes a step towards the largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(6, 8), mlp(8, 5)
        self.between = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x))).pow(2).mean()


class Scaled(nn.Module):
    """A loss divided by its own running size, which a layer far above it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 8, 8, 8)
        self.size: Tensor
        self.steps: Tensor
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        rows = self.net(x / self.size).pow(2).sum(1)
        with torch.no_grad():
            self.size.mul_(0.9).add_(rows.std(), alpha=0.1)
            self.steps.add_(1)
        return rows.mean()


class Normalised(nn.Module):
    """Running normalisation of rewards, as of Welford: from the batch's mean, variance and size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 8, 8, 5)
        self.mean: Tensor
        self.variance: Tensor
        self.seen: Tensor
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("variance", torch.ones(5))
        self.register_buffer("seen", torch.tensor(1e-4))

    def forward(self, x: Tensor) -> Any:
        rewards = self.net(x)
        made = (rewards - self.mean) / (self.variance + 1e-8).sqrt()
        with torch.no_grad():
            mean, variance, size = rewards.mean(0), rewards.var(0, unbiased=False), rewards.shape[0]
            delta, total = mean - self.mean, self.seen + size
            squares = self.variance * self.seen + variance * size + delta**2 * self.seen * size / total
            self.mean = self.mean + delta * size / total
            self.variance, self.seen = squares / total, total
        return made.pow(2).mean()


def replaced() -> nn.Module:
    return Centred(replaced=True)


def setup(build: Any, **changes: Any) -> Setup:
    return Setup(
        **{
            "build": build,
            "dataset": Points(),
            "optimizer": sgd,
            "global_batch": GLOBAL,
            "micro_batch": MICRO,
            "clip": None,
            **changes,
        }
    )


def one_process(build: Any, after: Any = None, steps: int = STEPS, seed: int = 0) -> tuple[list[float], nn.Module]:
    """A plain loop with whole batches: losses, and the model after the last step."""
    torch.manual_seed(seed)
    model = build().train()
    optimizer = sgd(list(model.named_parameters()))
    losses = []
    for step in range(steps):
        positions = range(step * GLOBAL, (step + 1) * GLOBAL)
        samples = [Points()[sample_index(p, size=50, seed=seed)]["x"] for p in positions]
        optimizer.zero_grad()
        loss = model(torch.stack(samples))
        loss.backward()
        optimizer.step()
        if after is not None:
            with torch.no_grad():
                after(dict(model.named_parameters()), dict(model.named_buffers()), step)
        losses.append(float(loss.detach()))
    return losses, model


def state_of(found: Setup) -> dict[str, Tensor]:
    """Parameters and buffers of the last run; every holder has the same bits."""
    values: dict[str, Tensor] = {}
    for session in found.finished:
        assert session.current is not None
        stage = session.current.stage
        for name, value in {**stage.parameters, **stage.buffers}.items():
            assert torch.equal(values.setdefault(name, value.detach()), value.detach()), name
    return values


class Taught(nn.Module):
    """A frozen teacher, as deep as its student and before it; a head that nobody uses; a count of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(6, 8, 8, 5).requires_grad_(False), mlp(6, 8, 8, 5)
        self.unused = nn.Linear(5, 2)
        self.updates: Tensor
        self.register_buffer("updates", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Any:
        goal = self.teacher(x * 0.9).softmax(-1)
        return -(goal * self.student(x).log_softmax(-1)).sum(-1).mean()


def follow(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """The teacher follows the student, the less the longer; the student's weights stay small."""
    buffers["updates"].add_(1)
    decay = torch.clamp((1 + buffers["updates"]) / (4 + buffers["updates"]), max=0.9)
    for name, teacher in parameters.items():
        if name.startswith("teacher."):
            student = parameters["student." + name.removeprefix("teacher.")]
            teacher.lerp_(student, 1 - decay)
            student.clamp_(-0.5, 0.5)
    parameters["unused.weight"].mul_(0.9)


class Balanced(nn.Module):
    """Experts whose router has a bias, which follows from the numbers of examples that each has got."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = mlp(6, 8, 8), mlp(8, 8, 5)
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) * 0.3)
        self.bias: Tensor
        self.counts: Tensor
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        scores = self.router(x).sigmoid()
        chosen = F.one_hot((scores + self.bias).topk(2, dim=-1).indices, 4).sum(-2).to(x.dtype)
        with torch.no_grad():
            self.counts.add_(chosen.sum(0))
        x = x + torch.einsum("be,ehk,bh->bk", chosen * scores, self.experts, x)
        return self.after(x).pow(2).mean()


def balance(parameters: dict[str, Tensor], buffers: dict[str, Tensor], step: int) -> None:
    """Experts that got too few examples become likelier, the less the later; some are drawn anew."""
    counts = buffers["counts"]
    buffers["bias"].add_(torch.sign(counts.mean() - counts) * 0.1 / (step + 1))
    counts.zero_()


def teach(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """DINO's teacher follows its student."""
    names = [name for name in parameters if name.startswith("teacher.")]
    with_students = [parameters["student." + name.removeprefix("teacher.")] for name in names]
    torch._foreach_lerp_([parameters[name] for name in names], with_students, 0.4)
    buffers["center"].clamp_(-0.8, 0.8)
