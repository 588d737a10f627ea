"""Branches on activations go as for first samples and parameters, and are refused where they go another way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.engine.models import Tokens
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.partition.cut.test_boundaries import Layers
from tests.unit.partition.families import Family
from tests.unit.partition.in_turn import differences, everywhere
from varuna.checks.assumptions import check_assumptions
from varuna.checks.experiment import Experiment
from varuna.core.errors import DataError, ModelError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.model import partition

functional = nn.functional
ODD = 63


class Guarded(Layers):
    """Asks for finite values, asserts, and a distribution that checks its own arguments."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not torch.isfinite(x).all():
                x = torch.nan_to_num(x)
        assert x.abs().max() < 100.0
        spread = functional.softplus(x)
        chance: Tensor = torch.distributions.Normal(x, spread, validate_args=True).log_prob(x.detach())  # type: ignore[no-untyped-call]
        return torch.tanh(x) + 0.1 * chance


class Large(Layers):
    """Goes another way for samples that contain one token, whose embedding is large."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.embed.weight[ODD] = 100.0

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = self.layers[0](x)
        if x.abs().amax() > 10.0:
            x = x * 0.5
        x = self.layers[1](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


LINE = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "amax() > 10.0" in text)


class Small(Tokens):
    """No odd token, but in some samples."""

    def __init__(self, *odd: int) -> None:
        super().__init__()
        self.odd = odd

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["input_ids"] = sample["input_ids"].clamp(max=ODD - 1)
        if index in self.odd:
            sample["input_ids"][3] = ODD
        return sample


@pytest.mark.nightly
def test_checks_of_what_layers_make_are_captured_and_change_nothing() -> None:
    model, found = differences(Family(Guarded), choose=everywhere)
    assert found == []
    assert model.conditions is None
    places = [place for section in model.sections for place in section.truths]
    assert len(places) >= 2 * 3
    assert all(Path(__file__).name in place for place in places)


def test_it_trains_as_eager_does_whatever_the_plan() -> None:
    with single_threaded():
        job = Setup(build=Large, dataset=Small())
        alone = job.losses(1, 1, steps=3)
        assert worst(alone, reference(job, steps=3)) < 1e-5
        assert job.losses(3, 1, steps=3) == alone
        assert worst(job.losses(2, 2, steps=3), alone) < 1e-6


@pytest.mark.parametrize("shape", by_depth([(2, 2)], [(1, 1), (2, 2)]))
def test_a_step_for_which_a_branch_goes_another_way_is_refused_and_not_applied(shape: tuple[int, int]) -> None:
    with single_threaded():
        job = Setup(build=Large, dataset=Small())
        odd = SampleSource(Small(), seed=0).indices([17])[0]  # of step 2, micro-batch 0
        job.dataset = Small(odd)
        with pytest.raises(DataError, match=rf"{Path(__file__).name}:{LINE}.*\b{odd}\b.* Step 2 is not applied"):
            job.run(*shape, steps=8)


@pytest.mark.nightly
def test_samples_that_disagree_at_once_are_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, source = Recipe(Large), SampleSource(Small(), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    check_assumptions(Experiment(model, recipe, materialise(recipe, 0), source))
    assert f"{Path(__file__).name}:{LINE}" in capsys.readouterr().err
    odd = source.indices([9])[0]
    with pytest.raises(DataError, match=rf"{Path(__file__).name}:{LINE}.* indices \[{odd}\]"):
        check_assumptions(Experiment(model, recipe, materialise(recipe, 0), SampleSource(Small(odd), seed=0)))


class Penalised(Guarded):
    """Two terms, each with a divisor of its own."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        penalty: Tensor = self.embed(input_ids).pow(2).sum(-1).mean()
        return super().forward(input_ids, labels) + 0.01 * penalty


@pytest.mark.nightly
def test_branches_are_looked_at_where_the_whole_batch_is_counted() -> None:
    recipe, source = Recipe(Penalised), SampleSource(Tokens(padded=True), seed=0)
    model = partition(recipe, source.micro_batch([0, 1]).tensors)
    assert model.whole is not None
    assert any(section.truths for section in model.sections)
    check_assumptions(Experiment(model, recipe, materialise(recipe, 0), source), 4)


class Limited(Layers):
    """As CLIP's own training code does: what is beyond is written back, unseen by autograd."""

    begin = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full([], self.begin))

    def middle(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(0, 4.6)
        return x * self.scale


class Beyond(Limited):
    begin = 5.0


@pytest.mark.nightly
def test_a_write_that_limits_a_parameter_is_nothing_within_the_limits_and_refused_beyond() -> None:
    assert differences(Family(Limited))[1] == []
    source = SampleSource(Small(), seed=0)
    model = partition(Recipe(Beyond), source.micro_batch([0, 1]).tensors)
    with pytest.raises(DataError, match=rf"{Path(__file__).name}:\d+ \(a parameter that is beyond its limits"):
        check_assumptions(Experiment(model, Recipe(Beyond), materialise(Recipe(Beyond), 0), source))


class Tossing(Layers):
    """A coin decides, not a sample: it would fall another way in the next micro-batch."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if torch.rand([]) < 0.5 else x


class Updated(Layers):
    """A branch on a buffer that each step changes."""

    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.tanh(x) if self.seen < 100 else x


class Counting(Layers):
    """A decision on a Python float, of which nothing is left in the graph."""

    def middle(self, x: Tensor) -> Tensor:
        return x[:, : 1 + int(x.abs().sum().item()) % 4].mean(1, keepdim=True) + x


UNDECIDED: list[type[Layers]] = [Updated, Tossing, Counting]


@pytest.mark.nightly
@pytest.mark.parametrize("build", by_depth(UNDECIDED[:1], UNDECIDED))
def test_what_no_sample_decides_stays_refused(build: type[Layers]) -> None:
    batch = SampleSource(Small(), seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(ModelError):
        partition(Recipe(build), batch)


def test_a_model_too_large_to_be_built_for_it_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.partition.capture.capture.FOLLOWED_BELOW_BYTES", 1000)
    batch = SampleSource(Small(), seed=0).micro_batch([0, 1]).tensors
    with pytest.raises(
        ModelError, match=rf"{Path(__file__).name}:{LINE}: a decision (.|\n)*parameters are [\d.]+ KiB, and"
    ):
        partition(Recipe(Large), batch)


# -- assertions ----------------------------------------------------------------------------------------------------


class Asserting(Large):
    """Of values, of samples, and of a number that was taken out of samples."""

    def claim(self, ids: Tensor, x: Tensor) -> None:
        torch._assert_async((x.abs() < 10.0).all())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers[0](self.embed(input_ids))
        self.claim(input_ids, x)
        x = self.layers[1](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OfSamples(Asserting):
    def claim(self, ids: Tensor, x: Tensor) -> None:
        torch._assert_async((ids != ODD).all())


class OfNumbers(Asserting):
    def claim(self, ids: Tensor, x: Tensor) -> None:
        torch._check((ids == ODD).sum().item() == 0)  # type: ignore[no-untyped-call]


ASSERTING: list[type[nn.Module]] = [OfSamples, Asserting, OfNumbers]


@pytest.mark.parametrize("build", by_depth(ASSERTING[:1], ASSERTING))
def test_what_forward_asserts_is_asserted_in_training(build: type[nn.Module]) -> None:
    """Plain PyTorch raises for such samples; a captured graph would train on them in silence."""
    with single_threaded():
        sound = Setup(build=build, dataset=Small())
        assert sound.losses(2, 1, steps=2) == sound.losses(1, 1, steps=2)
        with pytest.raises(DataError, match=r"test_guards\.py:\d+.* dataset indices \[(\d+, )*17(, \d+)*\]"):
            Setup(build=build, dataset=Small(17)).losses(2, 1, steps=8)
