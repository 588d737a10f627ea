"""Modules that capture cannot follow, in a small model: those that run as written, and those that are refused."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH, LENGTH = 8, 12


def sample(index: int) -> dict[str, Tensor]:
    """Tokens of 12; a number of them that varies with the index is padding."""
    tokens = torch.randint(1, 32, (LENGTH,), generator=torch.Generator().manual_seed(index))
    tokens[LENGTH - 1 - index % 5 :] = 0
    return {"input_ids": tokens, "labels": tokens.clone()}


class Net(nn.Module):
    """Embedding, a layer, the module in question, a layer, a head."""

    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(input_ids)))
        x = x + self.middle(x, input_ids != 0)
        x = torch.tanh(self.last(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def is_high(x: Tensor) -> bool:
    """Leaves torch, so that no graph can follow a branch on it."""
    return float(x.detach().float().numpy().sum()) > 0


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def turned(self, x: Tensor) -> Tensor:
        """Branches on an activation."""
        y: Tensor = self.layer(x)
        return y + x if is_high(x) else y - x


class Packed(nn.Module):
    """Reads as many tokens of each sample as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, mask.sum(1), batch_first=True, enforce_sorted=False)
        out: Tensor = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        return out


class Mapped(Weighted):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(lambda row: torch.tanh(self.layer(row)) * row.sum())(x)
        return mapped


class Forces(Weighted):
    """The loss depends on a gradient, of a leaf or of an activation: trained through a second backward."""

    of_leaf = True

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        at = x.detach().clone().requires_grad_() if self.of_leaf else x
        energy = torch.tanh(self.layer(at)).square().sum()
        (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return force


class OfActivation(Forces):
    of_leaf = False


class Calls(torch.autograd.Function):
    """Is given a module, and runs it again in the backward (as Reformer's layers do)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            called: Tensor = module(x)
        return called

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            ctx.module(again).backward(gradients[0])
        return again.grad, None


class GivenModule(Weighted):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        called: Tensor = Calls.apply(x, self.layer)  # type: ignore[no-untyped-call]
        return called


class Branching(Weighted):
    """Goes two ways, and uses a table of its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.tables = [torch.arange(float(WIDTH))]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        layer = self.layer if is_high(x) else self.other
        scaled: Tensor = layer(x) * self.tables[0]
        return scaled


class OneByOne(Weighted):
    """Loops over the samples, which fixes their number in a graph, and treats each as it is."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([self.layer(each) if is_high(each) else -each for each in list(x)])


class Outside(Weighted):
    """Leaves torch."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        wave: Tensor = self.layer(x) * torch.from_numpy(np.tanh(x.detach().numpy()))
        return wave


class Within(nn.Module):
    """The innermost module is taken, and one that returns its argument returns a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.same = Same()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.same(self.layer(self.inner(x, mask))).mul_(2))


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if is_high(x * x) else -x


class Picking(nn.Module):
    """Picks as many tokens of each sample; capture takes their number for one that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        sums = x.sum(-1)
        chosen = torch.zeros_like(sums, dtype=torch.bool).scatter(1, sums.topk(4, dim=1).indices, True)
        return x[chosen].reshape(x.shape[0], -1, WIDTH)


class Thinned(nn.Module):
    """Hands what was picked to a module that must run as written."""

    def __init__(self) -> None:
        super().__init__()
        self.picking, self.outside = Picking(), Outside()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        thinned: Tensor = self.outside(self.picking(x), mask)
        return x + thinned.mean(1, keepdim=True)


class Holder(nn.Module):
    """Uses a module that has another name, too."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.held(x, mask)
        return found


class Shared(nn.Module):
    """Has a module with two names, which must run as written."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = Outside()
        self.holder = Holder(self.outside)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.holder(x, mask)
        return found


class All(nn.Module):
    """One of each kind in turn, so that all are captured at once."""

    apart = (Packed, Mapped, Forces, OfActivation, GivenModule, Outside, OneByOne)
    """These treat the samples of a batch apart."""

    def __init__(self, kinds: tuple[type[nn.Module], ...] = (*apart, Branching, Within)) -> None:
        super().__init__()
        self.each = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for each in self.each:
            x = torch.tanh(x + each(x, mask))
        return x


def all_kinds() -> nn.Module:
    """A net with all of them."""
    return Net(All)


def tied_kinds() -> nn.Module:
    """A net with those that treat samples apart; one of their weights is the head's, too."""
    net = Net(lambda: All(All.apart))
    given: Any = net.middle.each[4]  # type: ignore[index]
    given.layer = nn.Linear(WIDTH, WIDTH)
    net.last.weight = given.layer.weight
    return net


class Both(nn.Module):
    """Its weight is tied to another module's, its second one is frozen."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) if is_high(x) else -self.frozen(x)
        back: Tensor = (y @ self.weight.t()) @ self.weight
        return back


def sharing() -> nn.Module:
    """A net whose middle uses the head's weight and a frozen layer."""
    net = Net(nn.Identity)
    net.middle = Both(net.head.weight)  # type: ignore[arg-type]
    return net


class Drawing(nn.Module):
    """Draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = x if random.random() < 0.5 else -x
        return self.dropout(kept) * float(np.random.rand()) if is_high(x * x) else x


def drawing() -> nn.Module:
    """A net that draws in a module that runs as written."""
    return Net(Drawing)


class Noting(Weighted):
    """Keeps what it saw last, for whoever looks; nothing else depends on it."""

    seen: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen = None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen = x.detach()
        return self.turned(x)


class Starting(Noting):
    """Takes its scale from the first batch that it sees."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = x.detach().std()
        return self.turned(x) * self.seen


class Counting(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return self.turned(x)


class Remembering(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.mean += x.detach().mean()
        return self.turned(x)


class Listing(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen.append(x)
        return self.turned(x)


class Overwriting(Weighted):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if is_high(x * x):
            mask.fill_(True)
        return self.turned(x)


class Fresh(Weighted):
    """Draws from a generator that nobody can seed."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        shift = random.SystemRandom().random()
        return self.turned(x) + shift


class Whole(Net):
    """Its middle runs as written; but it computes a gradient itself."""

    def __init__(self) -> None:
        super().__init__(Branching)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels)
        (slope,) = torch.autograd.grad(loss, self.head.weight, create_graph=True)
        penalised: Tensor = loss + slope.square().sum()
        return penalised
