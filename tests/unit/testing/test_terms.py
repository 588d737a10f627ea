"""Losses of several terms come out as in one whole batch, and so do gradients, in any plan."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.depth import by_depth
from tests.unit.engine.models import adamw
from tests.unit.engine.plain import reference, targets, train_plainly, worst
from tests.unit.engine.ranks import Setup
from tests.unit.testing import work
from tests.unit.testing.test_evaluate import eager_loss, train
from tests.unit.testing.test_resuming import train as resumed
from tests.unit.testing.work import OnceOthers
from varuna.core.errors import DataError, ModelError
from varuna.core.precision import Precision
from varuna.engine.graphs.compiled import Compiler
from varuna.job.options import Loss
from varuna.testing import run
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")


class Sentences:
    """Token ids, masked labels (in half of the samples none), a mask of uneven length, a class, a number."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 32, (8,), generator=draws)
        labels = torch.where(torch.rand(8, generator=draws) < 0.3, ids, -100)
        if index % 2:
            labels[:] = -100
        mask = torch.zeros(8)
        mask[: index % 8] = 1
        kind = torch.randint(0, 2, (), generator=draws)
        return {"ids": ids, "labels": labels, "mask": mask, "kind": kind, "number": torch.rand((), generator=draws)}


class Batch(NamedTuple):
    """The inputs of losses."""

    ids: Tensor
    labels: Tensor
    mask: Tensor
    kind: Tensor
    target: Tensor
    early: Tensor
    each: Tensor


class Model(nn.Module):
    """Heads for all kinds of losses over two layers; ``terms`` of a subclass makes the loss of them."""

    classes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.words, self.kinds, self.number = nn.Linear(8, 32), nn.Linear(8, 2), nn.Linear(8, 1)
        self.register_buffer("classes", torch.tensor([0.3, 1.7]))

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor, kind: Tensor, number: Tensor) -> Tensor:
        early = x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        each = F.cross_entropy(self.words(x).transpose(1, 2), ids, reduction="none")
        return self.terms(x, Batch(ids, labels, mask, kind, number, early, each))

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        raise NotImplementedError

    def masked(self, x: Tensor, b: Batch) -> Tensor:
        return F.cross_entropy(self.words(x).flatten(0, 1), b.labels.flatten())

    def next(self, x: Tensor, b: Batch) -> Tensor:
        return F.cross_entropy(self.kinds(x.mean(1)), b.kind)


class MaskedAndNext(Model):
    def terms(self, x: Tensor, b: Batch) -> Tensor:
        return self.masked(x, b) + 0.5 * self.next(x, b)


class HandMasked(Model):
    def terms(self, x: Tensor, b: Batch) -> Tensor:
        return (b.each * b.mask).sum() / b.mask.sum()


class HandMaskedClamped(Model):
    def terms(self, x: Tensor, b: Batch) -> Tensor:
        some = b.mask * (b.ids > 30)  # often none in a micro-batch
        return (b.each * some).sum() / some.sum().clamp(min=1) + b.each.mean()


class Regularised(Model):
    def terms(self, x: Tensor, b: Batch) -> Tensor:
        return (
            self.masked(x, b) + 0.1 * sum((p**2).sum() for p in self.layers.parameters()) + 3.0 * self.next(x, b) + 1.0
        )


class Sums(Model):
    """A variational one: a sum over all elements and a divergence."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        mean, log_variance = x.chunk(2, -1)
        divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        return F.mse_loss(self.number(x).flatten(), b.mask.flatten(), reduction="sum") + divergence


class Detection(Model):
    """Boxes divided by their number in the batch, classes by examples."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        boxes = max(1, 2) * torch.clamp(b.mask.sum() / 2, min=1.0)
        place = F.l1_loss(self.number(x)[..., 0], b.mask, reduction="none") * b.mask
        losses = {"box": place.sum() / boxes, "class": self.next(x, b), "early": b.early.pow(2).mean()}
        total: Tensor = torch.zeros(())
        for loss in losses.values():
            total += loss * 0.7
        return total


class Picked(Model):
    def terms(self, x: Tensor, b: Batch) -> Tensor:
        chosen = b.labels != -100
        words: Tensor = F.cross_entropy(self.words(x)[chosen], b.labels[chosen], label_smoothing=0.1)
        numbers: Tensor = self.number(x)[..., 0][chosen]
        return words + (numbers**2).mean() + torch.stack([self.next(x, b), words]).sum()


class PerToken(Model):
    """The divisor goes into each token's loss, and one into each class's."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        share = b.mask / b.mask.sum()
        by_class = torch.nn.functional.one_hot(b.kind, 2).float()
        each = F.cross_entropy(self.kinds(x.mean(1)), b.kind, reduction="none")
        classes = (each[:, None] * by_class).sum(0) / by_class.sum(0).clamp(min=1)
        return (b.each * share).sum() + classes.mean()


class PerTokenInPlace(Model):
    """The same, written over a part of the tokens."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        share = torch.ones_like(b.mask)
        share[:, 2:] = b.mask[:, 2:] / b.mask.sum()
        return (b.each * share).mean()


class Many(Model):
    """Loss operations of many kinds, weighted."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        logits, number = self.kinds(x.mean(1)), self.number(x)[..., 0]
        binary = F.binary_cross_entropy_with_logits(number, b.mask, weight=b.mask, pos_weight=torch.tensor(2.0))
        weighted = F.cross_entropy(logits, b.kind, weight=self.classes)
        smooth = F.smooth_l1_loss(number.mean(1), b.target) + F.huber_loss(number, b.mask)
        divergence = F.kl_div(F.log_softmax(x, -1), torch.softmax(x.detach() * 2, -1), reduction="batchmean")
        nll = F.nll_loss(F.log_softmax(self.words(x), -1).flatten(0, 1), b.labels.flatten())
        return binary + weighted * 2 - smooth / 3 + 0.1 * divergence + nll


CASES = [
    MaskedAndNext,
    HandMasked,
    HandMaskedClamped,
    Regularised,
    Sums,
    Detection,
    Picked,
    PerToken,
    PerTokenInPlace,
    Many,
]


def by_kind(b: Batch, values: Tensor) -> Tensor:
    return torch.zeros(2).scatter_add(0, b.kind, values)


TERMS: list[Callable[[Model, Tensor, Batch], Tensor]] = [
    lambda m, x, b: m.masked(x, b),
    lambda m, x, b: m.next(x, b),
    lambda m, x, b: (b.each * b.mask).sum() / b.mask.sum().clamp(min=1),
    lambda m, x, b: (b.each * b.mask).sum(1).div(b.mask.sum(1) + 1).mean(),
    lambda m, x, b: F.mse_loss(m.number(x)[..., 0], b.mask, reduction="sum") / b.kind.shape[0],
    lambda m, x, b: 0.01 * x.pow(2).sum(),
    lambda m, x, b: m.words.weight.abs().mean(),
    lambda m, x, b: (m.number(x)[..., 0] * b.mask)[b.mask > 0].sum() / (b.mask > 0).sum().float().sqrt(),
    lambda m, x, b: (by_kind(b, x.mean((1, 2))) / by_kind(b, torch.ones_like(b.target))).sum(),
    lambda m, x, b: F.l1_loss(m.number(x).flatten(1), b.mask, reduction="none").mean(0).sum(),
]


@pytest.mark.parametrize("seed", range(by_depth(1, 3)))
def test_random_sums_of_random_terms(seed: int) -> None:
    draw = random.Random(seed)
    chosen = [(draw.choice([1.0, -0.5, 0.3, 2]), draw.choice(TERMS)) for _ in range(4)]

    class Drawn(Model):
        def terms(self, x: Tensor, b: Batch) -> Tensor:
            return torch.stack([factor * term(self, x, b) for factor, term in chosen[:2]]).sum() + (
                chosen[2][1](self, x, b) - chosen[3][1](self, x, b) / 3
            )

    setup = Setup(build=Drawn, dataset=Sentences(), micro_batch=draw.choice([1, 3]), clip=None)
    assert setup.model.whole is not None
    assert not setup.model.mixing
    assert worst(setup.losses(1, 2, 2), reference(setup, 2)) < 5e-6


@pytest.mark.nightly
def test_an_evaluation_counts_all_its_examples() -> None:
    setup = Setup(build=Detection, dataset=Sentences(), micro_batch=3, clip=None)
    undisturbed = [loss for loss, _ in setup.losses(1, 1, by_depth(2, 3))]
    losses, found = train(setup, 2, 2, Sentences(), 50)
    assert max(abs(a - b) / b for a, b in zip(losses, undisturbed, strict=True)) < 1e-6
    expected = eager_loss(setup, Sentences(), 50)
    assert abs(found[-1].loss - expected) < 2e-6 * abs(expected)
    assert found[-1].weight == 50


class Uneven(Sentences):
    """Masks that do not fit the ids: nothing can be counted."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "mask": torch.ones(9)}


@pytest.mark.nightly
def test_examples_that_cannot_be_counted_end_an_evaluation_instead_of_a_thread() -> None:
    with pytest.raises(DataError, match="'mask'"):
        train(Setup(build=HandMaskedClamped, dataset=Sentences(), micro_batch=3, clip=None), 1, 1, Uneven(), 9)


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "near"), [("bf16", 2e-2), ("fp16", 3e-3)])
def test_half_precision_adds_terms_up_in_fp32(precision: Precision, near: float) -> None:
    setup = Setup(build=MaskedAndNext, dataset=Sentences(), micro_batch=3, clip=None, precision=precision, unit=8.0)
    one = setup.losses(1, 1, 2)
    assert repr(setup.losses(2, 1, 2)) == repr(one)  # as text: the first steps of fp16 may overflow
    (loss, _), *_ = reference(setup, 1)
    assert abs(one[0][0] - loss) < near * loss


@pytest.mark.nightly
def test_compiled_sections_add_terms_up_alike() -> None:
    setup = Setup(build=Detection, dataset=Sentences(), micro_batch=3, clip=None, compiler=Compiler("aot_eager"))
    one = setup.losses(1, 1, 2)
    assert setup.losses(2, 1, 2) == one
    assert worst(one, reference(setup, 2)) < 2e-6


def test_a_step_of_several_terms_that_is_broken_off_runs_again_as_a_whole() -> None:
    """Its sums are divided by counts of the whole batch, with which another generation begins anew."""
    script = work.script(3, 8, 2, model=MaskedAndNext, dataset=Sentences())
    outcome = run(script, workers=4, stages=2, faults=[OnceOthers(3, 1, "B", 2)])
    assert (outcome.plans, outcome.kept) == (("2x2", "2x1"), (0, 0))
    assert outcome.losses == pytest.approx(run(script).losses, rel=1e-6)


@pytest.mark.nightly
def test_terms_go_on_in_other_plans(tmp_path: Path) -> None:
    def go_on(stages: int, replicas: int, steps: int) -> list[tuple[float, float]]:
        setup = Setup(build=MaskedAndNext, dataset=Sentences(), micro_batch=3, clip=None, directory=str(tmp_path))
        return resumed(setup, stages, replicas, steps, str(tmp_path))

    losses = [*go_on(1, 2, 1), *go_on(3, 1, 2), *go_on(2, 2, 3)]
    assert worst(losses, reference(Setup(build=MaskedAndNext, dataset=Sentences(), clip=None), 3)) < 5e-6


class Shorter(Sentences):
    """Half of the samples are half as long."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["mask"][4:] = 0
        return sample


def cut(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    length = 4 if int(batch["kind"].sum()) % 2 else 8
    return {key: value[:, :length] if value.dim() > 1 else value for key, value in batch.items()}


class Weighted(Model):
    def terms(self, x: Tensor, b: Batch) -> Tensor:
        return (b.each * b.mask).sum() / b.mask.sum() + self.next(x, b)


@pytest.mark.nightly
def test_terms_add_up_over_micro_batches_of_several_lengths() -> None:
    """Beyond the mask nothing counts: a batch cut to half its length has the same loss."""
    long = Setup(build=Weighted, dataset=Shorter(), micro_batch=2, clip=None)
    mixed = Setup(build=Weighted, dataset=Shorter(), micro_batch=2, clip=None, collate=cut, lengths=(4, 8))
    assert mixed.model.variants
    found = mixed.losses(2, 1, 2)
    assert abs(found[0][0] - long.losses(1, 1, 1)[0][0]) < 0.05  # x.mean(1) of the second term is over other lengths


class Balanced(Model):
    """Cross-entropy, and experts that are to be used equally by all tokens of a batch."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        odds = torch.softmax(self.number(x) * torch.arange(4.0), -1).flatten(0, 1)
        balance = (F.one_hot(odds.argmax(-1), 4).float().mean(0) * odds.mean(0)).sum()
        return self.masked(x, b) + 0.01 * balance


class Pairs(Model):
    """As CLIP has it: each term is divided by a number of examples, and its targets follow from that, too."""

    def terms(self, x: Tensor, b: Batch) -> Tensor:
        alike = x.mean(1) @ b.early.mean(1).T
        one, other = torch.arange(len(x)), torch.arange(len(alike))
        return (F.cross_entropy(alike, one) + F.cross_entropy(alike.T, other)) / 2


@pytest.mark.nightly
def test_counts_that_follow_from_the_number_of_examples_alone_need_no_samples() -> None:
    setup = Setup(build=Pairs, dataset=Sentences(), micro_batch=3, clip=None)
    assert setup.model.whole is not None
    one = setup.losses(1, 1, 2)
    assert setup.losses(3, 1, 2) == one
    assert worst(setup.losses(2, 2, 2), one) < 1e-6


@pytest.mark.nightly
def test_a_loss_that_mixes_examples_trains_within_micro_batches_if_the_user_says_so() -> None:
    def trainer(**given: Any) -> Trainer:
        return Trainer(Balanced, Sentences(), adamw, 8, device="cpu", **given)

    with pytest.raises(ModelError, match=r"multiplies .*test_terms\.py:\d+ \(balance = .* per_micro_batch=True"):
        next(trainer(micro_batch=4).steps(1))
    losses = [step.loss for step in trainer(micro_batch=4, loss=Loss(per_micro_batch=True)).steps(2)]
    setup = Setup(build=Balanced, dataset=Sentences(), micro_batch=4, clip=None)
    assert setup.model.counts_targets
    expected = train_plainly(setup, 2, whole_batch=False, weigh=targets).curve
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert worst(setup.losses(2, 2, 2), expected) < 1e-5
