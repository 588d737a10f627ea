"""Operations that mix a batch's examples are found in the graph, and told with their place; others are left alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.depth import by_depth
from varuna.checks.experiment import Experiment
from varuna.checks.mixing import check_mixing, try_mixing
from varuna.core.errors import ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe, capture
from varuna.partition.graph.simplify import simplify
from varuna.partition.initial.constructor import materialise
from varuna.partition.loss.terms import Mixing, mixing_of, terms_of
from varuna.partition.model import partition

LossFunction = Callable[[Tensor, Any], Tensor]


class Sentences:
    """Token ids, uneven masks, classes."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        mask = torch.zeros(6)
        mask[: 1 + index % 6] = 1
        ids = torch.randint(0, 16, (6,), generator=draws)
        return {"ids": ids, "mask": mask, "kind": torch.randint(0, 3, (), generator=draws)}


class Hidden(nn.Module):
    """Two layers; what comes out is ``[examples, 6, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.one(self.embed(ids)))
        found: Tensor = self.two(x)
        return found


def mixing(loss: LossFunction, build: type[nn.Module] = Hidden) -> tuple[Mixing, ...]:
    captured = capture(Recipe(build, loss), SampleSource(Sentences(), seed=0).micro_batch([0, 1]).tensors)
    simplify(captured)
    return mixing_of(terms_of(captured))


def first(x: Tensor) -> Tensor:
    found: Tensor = F.normalize(x[:, 0], dim=-1)
    return found


def contrastive(x: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(first(x) @ first(x).T, torch.arange(x.shape[0]))


def supervised_contrastive(x: Tensor, batch: Any) -> Tensor:
    z = torch.cat([first(x), F.normalize(x[:, 1], dim=-1)])
    kinds = batch["kind"].repeat(2)
    same = (kinds[:, None] == kinds[None, :]).float()
    logs = F.log_softmax(z @ z.T / 0.1, dim=-1)
    found: Tensor = -((same * logs).sum(1) / same.sum(1)).mean()
    return found


def balanced(x: Tensor, batch: Any) -> Tensor:
    """Of the experts, as Switch has it."""
    odds = torch.softmax(x, -1).flatten(0, 1)
    chosen = F.one_hot(odds.argmax(-1), 8).float()
    return x.pow(2).mean() + 1e-9 * (chosen.mean(0) * odds.mean(0)).sum()


def balanced_by_counting(x: Tensor, batch: Any) -> Tensor:
    """The same as transformers has it: adds up by a number of each expert."""
    odds = torch.softmax(x, -1).flatten(0, 1)
    counts = torch.zeros(8).scatter_add_(0, odds.argmax(-1), batch["mask"].flatten())
    found: Tensor = F.mse_loss(x, 0 * x) + 1e-9 * (counts / batch["mask"].sum() * odds.mean(0)).sum()
    return found


def batch_prior(x: Tensor, batch: Any) -> Tensor:
    mean = torch.softmax(x, -1).mean((0, 1))
    return (mean * mean.log()).sum()


def hardest(x: Tensor, batch: Any) -> Tensor:
    return x.pow(2).mean((1, 2)).topk(1).values.mean()


def mixup(x: Tensor, batch: Any) -> Tensor:
    return (0.7 * x + 0.3 * x.flip(0)).pow(2).mean()


def shuffled(x: Tensor, batch: Any) -> Tensor:
    return (x - x[torch.randperm(x.shape[0])]).pow(2).mean()


def centred(x: Tensor, batch: Any) -> Tensor:
    return (x - x.mean(0)).pow(2).mean()


def rooted(x: Tensor, batch: Any) -> Tensor:
    return x.pow(2).mean().sqrt()


def dice(x: Tensor, batch: Any) -> Tensor:
    p, m = torch.sigmoid(x[..., 0]), batch["mask"]
    found: Tensor = 1 - 2 * (p * m).sum() / (p.sum() + m.sum())
    return found


def neighbours(x: Tensor, batch: Any) -> Tensor:
    return (x[1:] - x[:-1]).pow(2).sum() / x.shape[0]


def attended(x: Tensor, batch: Any) -> Tensor:
    """The examples' places are taken for tokens."""
    y = x.transpose(0, 1)
    return F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None]).pow(2).mean()


def matched(x: Tensor, batch: Any) -> Tensor:
    """Statistics of the batch against given ones."""
    return F.mse_loss(x.mean(0), torch.ones(6, 8))


def offset(x: Tensor, batch: Any) -> Tensor:
    return torch.addmm(x.mean((0, 1)), x[:, 0], torch.eye(8)).pow(2).mean()


def scaled(x: Tensor, batch: Any) -> Tensor:
    return F.layer_norm(x, (8,), weight=x.mean((0, 1))).pow(2).mean()


def rolled(x: Tensor, batch: Any) -> Tensor:
    """Without dimensions: all elements, one after the other."""
    return (x - x.roll(1)).pow(2).mean()


def stacked(x: Tensor, batch: Any) -> Tensor:
    found: Tensor = torch.stack([x.pow(2).mean(), x.amax()]).sum()
    return found


MIXING: dict[LossFunction, str] = {
    contrastive: "compares",
    supervised_contrastive: "compares",
    balanced: "multiplies sums or means",
    balanced_by_counting: "multiplies sums or means",
    batch_prior: "computes something",
    hardest: "chooses among",
    mixup: "by their place",
    shuffled: "by their place",
    centred: "for each example",
    rooted: "computes something",
    dice: "divides by",
    neighbours: "by their place",
    attended: "compares",
    matched: "computes something",
    offset: "for each example",
    scaled: "for each example",
    rolled: "by their place",
    stacked: "chooses among",
}


@pytest.mark.parametrize(
    "loss", by_depth([contrastive, balanced, hardest, dice, matched], list(MIXING)), ids=lambda loss: loss.__name__
)
def test_what_mixes_examples_is_found_in_the_graph_and_told_with_its_line(loss: LossFunction) -> None:
    found = [each for each in mixing(loss) if each.certain]
    assert any(MIXING[loss] in each.what for each in found), found
    assert all(each.where is not None and "test_mixing.py:" in each.where for each in found), found


def apart(x: Tensor, batch: Any) -> Tensor:
    """Much of what losses do, flattened, transposed, gathered, repeated; all of it for each example."""
    rows = torch.arange(x.shape[0])
    last = x[rows, (batch["mask"].sum(1) - 1).long()]
    flat = x.reshape(-1, 8)[:, :3]
    turned = x.permute(1, 0, 2).reshape(-1, 8)
    kinds = batch["kind"][:, None].expand(-1, 6)
    two = torch.cat([x, 2 * x]).chunk(2)
    chosen = x[batch["mask"].bool()]
    places = (batch["mask"] > 0).nonzero(as_tuple=True)
    ordered = x.sort(dim=-1).values.cumsum(1).flip(2)
    attention = F.scaled_dot_product_attention(x, x, x, attn_mask=batch["mask"][:, None, :].bool())
    each = [
        F.cross_entropy(last[:, :3], batch["kind"]),
        F.cross_entropy(flat, kinds.flatten()),
        turned.norm(dim=-1).mean(),
        (two[1] - two[0]).pow(2).mean(),
        chosen.pow(2).mean() + x[places].logsumexp(-1).mean(),
        (ordered * attention).amax(1).mean(),
        torch.einsum("btd,bsd->bts", x, x).softmax(-1).diagonal(dim1=1, dim2=2).mean(),
        x.gather(2, x.argmax(-1, keepdim=True)).mean(),
        torch.where(batch["mask"].any(), x.mean(), torch.zeros(())),
        F.layer_norm(x, (8,)).repeat_interleave(2, 0).mean() + F.dropout(x, 0.1).mean(),
    ]
    return torch.stack(each).mean()


def windowed(x: Tensor, batch: Any) -> Tensor:
    """Operations along dimensions of their own, and those that no tag of torch calls elementwise."""
    y = x.clone()
    y[batch["mask"].bool()] = 0.5
    z = F.hardswish(x) + F.prelu(x, torch.full((6,), 0.1)) + torch.rsub(x, 1) + torch.isin(x, torch.ones(1)) + y
    spectrum = torch.fft.rfft(x, dim=1).abs() + torch.fft.fft2(x).abs()[:, :4]
    seen = F.pad(x, (1, 1), mode="reflect").unfold(1, 2, 2).cummax(-1).values
    resized = F.interpolate(batch["mask"][None], size=3)[0] + F.avg_pool1d(x[None, :, :, 0], 2)[0]
    found: Tensor = z.tril().mean() + spectrum.mean() + seen.mean() + resized.mean()
    return found


def multiplied(x: Tensor, batch: Any) -> Tensor:
    """Products, similarities and the like with dimensions that go: within each example, or summed over all of them."""
    each = [
        x @ torch.ones(8),
        torch.ones(6) @ x,
        torch.addmm(x[:, 0], x[:, 1], torch.eye(8)),
        torch.baddbmm(x, x @ x.mT, x),
        F.linear(torch.ones(3, 8), x[:, 0]).T,
        F.cosine_similarity(x, 2 * x),
        F.pairwise_distance(x, 2 * x),
        x.kthvalue(2, dim=1).values,
        x.view(-1, 3, 2, 8).sum((1, 3)),
        torch.stack(x.unbind(2)).mean(0),
    ]
    sums = batch["mask"][:, 0] @ x[:, 0, 0] + (x[:, 0].T @ torch.ones(x.shape[0])).sum()
    found: Tensor = torch.stack([part.flatten(1).mean(1) for part in each]).mean() + sums
    return found


@pytest.mark.nightly
def test_what_keeps_examples_apart_is_not_suspected() -> None:
    assert mixing(multiplied) == ()
    assert mixing(windowed) == ()
    found = [each for each in mixing(apart) if "diagonal" not in (each.where or "")]
    assert not [each for each in found if each.certain], found


def reordered(x: Tensor, batch: Any) -> Tensor:
    """Sorts all tokens by their expert and back, as mixtures of experts do: nothing is mixed."""
    tokens = x.reshape(-1, 8)
    order = tokens.argmax(-1).argsort(stable=True)
    back = torch.empty_like(tokens).index_copy(0, order, torch.tanh(tokens[order]))
    return F.cross_entropy(back.view(-1, 6, 8)[:, 0, :3], batch["kind"])


def misplaced(x: Tensor, batch: Any) -> Tensor:
    """Forgets to put them back."""
    tokens = x.reshape(-1, 8)
    order = tokens.argmax(-1).argsort(stable=True)
    return F.cross_entropy(tokens[order].view(-1, 6, 8)[:, 0, :3], batch["kind"])


def stabilised(x: Tensor, batch: Any) -> Tensor:
    """Takes off what cancels out."""
    powers = (x - x.amax().clamp(min=0)).exp()
    return (powers / powers.sum(-1, keepdim=True)).pow(2).mean()


def misplaced_product(x: Tensor, batch: Any) -> Tensor:
    """The same, and adds up in a product."""
    tokens = x.reshape(-1, 8)
    order = tokens.argmax(-1).argsort(stable=True)
    found: Tensor = torch.einsum("btd,bt->", tokens[order].view(-1, 6, 8), batch["mask"])
    return found


def renormed(x: Tensor, batch: Any) -> Tensor:
    """Limits the norm of each column, over all examples."""
    return x[:, 0].renorm(2, 1, 0.1).sum()


class Normed(Hidden):
    """Mixes examples by its normalisation alone, which ``micro_batch=`` answers for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.norm(super().forward(ids))
        return found


MODELS: list[type[nn.Module]] = [Hidden, Normed]
DECIDED: dict[LossFunction, str | None] = {
    reordered: None,
    stabilised: None,
    misplaced: "by their place",
    misplaced_product: "by their place",
    renormed: "may mix",
}
"""Losses with operations that may mix, and the words for how they do."""


@pytest.mark.parametrize("build", by_depth(MODELS[:1], MODELS))
@pytest.mark.parametrize("loss", DECIDED)
def test_a_run_decides_about_operations_that_may_mix(loss: LossFunction, build: type[nn.Module]) -> None:
    recipe, source = Recipe(build, loss), SampleSource(Sentences(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    initial = materialise(recipe, 0)
    assert [each.certain for each in model.mixing] == [False] * len(model.mixing)
    assert model.mixing
    if how := DECIDED[loss]:
        with pytest.raises(ModelError, match=rf"{how} .*test_mixing\.py"):
            try_mixing(Experiment(model, recipe, initial, source), None, accepted=False)
        try_mixing(Experiment(model, recipe, initial, source), 2, accepted=True)
    else:
        try_mixing(Experiment(model, recipe, initial, source), None, accepted=False)


@pytest.mark.nightly
def test_a_refusal_asks_for_what_is_missing_only() -> None:
    source = SampleSource(Sentences(), seed=0)
    found = partition(Recipe(Hidden, contrastive), source.micro_batch([0, 1]).tensors)
    apart = replace(found, mixing=())
    with pytest.raises(
        ModelError,
        match=r"test_mixing\.py:\d+ .*pass micro_batch= .* and loss=varuna\.Loss\(\.\.\., per_micro_batch=True\)",
    ):
        check_mixing(found, None, accepted=False)
    with pytest.raises(ModelError, match=r"pass loss=varuna\.Loss\(\.\.\., per_micro_batch=True\);"):
        check_mixing(found, 4, accepted=False)
    with pytest.raises(ModelError, match=r"pass micro_batch= \(how many"):
        check_mixing(found, None, accepted=True)
    check_mixing(found, 4, accepted=True)
    check_mixing(apart, None, accepted=False)
