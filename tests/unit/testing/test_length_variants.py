"""Several declared lengths: micro-batches of different lengths in one step, in any plan, as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth, nightly
from tests.unit.checks.verified import verify
from tests.unit.engine.models import Tokens, tiny_llama
from tests.unit.engine.plain import targets, train_plainly, worst
from tests.unit.engine.ranks import Setup
from varuna.checks.experiment import Experiment
from varuna.checks.loss_weight import check_weighing
from varuna.core.errors import DataError, ModelError, UsageError
from varuna.data import sample_index
from varuna.data.samples import SampleSource
from varuna.engine.base.spans import Span, subscribe
from varuna.engine.worker.session import Session
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.constructor import materialise
from varuna.partition.lengths import check_lengths, partition_lengths, variant_of
from varuna.schedule.work_order import by_work

LENGTHS = (6, 12, 16)


class Positions(nn.Module):
    """Learnt positions, of which the longest length takes all: a slice that is none there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(64, 8), nn.Parameter(torch.randn(16, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.position[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + torch.tanh(layer(x).cumsum(1) / x.shape[1])
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Sentences(Tokens):
    """Sentences of 3 to 16 tokens."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {key: value[: 3 + (index * 7) % 14] for key, value in sample.items()}


def padded(samples: Any) -> dict[str, Tensor]:
    """To the shortest declared length that holds all of them."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = min(each for each in LENGTHS if each >= longest)
    fill = {"input_ids": 0, "labels": -100}
    rows = {
        key: [nn.functional.pad(s[key], (0, length - len(s[key])), value=fill[key]) for s in samples] for key in fill
    }
    return {key: torch.stack(values) for key, values in rows.items()}


def setup(size: int = 6, **changes: Any) -> Setup:
    fields = {"build": Positions, "dataset": Sentences(), "collate": padded, "lengths": LENGTHS, **changes}
    return Setup(global_batch=size, micro_batch=1, **fields)


def test_micro_batches_of_all_lengths_train_as_in_one_process_at_any_depth() -> None:
    """``test_options`` compares them with a plain loop."""
    job = setup()
    source = SampleSource(Sentences(), seed=0, collate=padded)
    found = {variant_of(job.model, source.micro_batch([p]).tensors, ()) for p in range(6)}
    assert len(found) > 1  # within one step
    steps = by_depth(2, 4)
    assert job.losses(3, 1, steps) == job.losses(1, 1, steps)


def test_a_stage_with_one_micro_batch_a_step_waits_for_no_lengths_that_only_later_steps_tell() -> None:
    job = setup(size=1)
    assert job.losses(3, 1, 3) == job.losses(1, 1, 3)


class Unreadable(Sentences):
    """On a machine whose disk is gone."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        raise OSError("the disk is gone")


class OneUnreadable(Setup):
    def session(
        self, membership: Any, store: Any, steps: int, saver: Any = None, rank: int = 0, publisher: Any = None
    ) -> Session:
        self.dataset = Unreadable() if rank == 1 else Sentences()
        return super().session(membership, store, steps, saver, rank)


def test_samples_that_cannot_be_read_stop_a_stage_that_waits_for_an_activation_of_their_length() -> None:
    fields = {"build": Positions, "dataset": Sentences(), "collate": padded, "lengths": LENGTHS}
    with pytest.raises(OSError, match="the disk is gone"):
        OneUnreadable(global_batch=6, micro_batch=1, **fields).run(2, 1)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_the_schedules_with_split_backwards_run_too() -> None:
    assert setup(policy="adaptive").losses(3, 1, steps=2) == setup().losses(1, 1, steps=2)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(3, 1), *nightly((2, 1), (5, 1), (2, 2))])
def test_a_pipeline_runs_micro_batches_in_an_order_by_length_from_the_second_step_on(shape: tuple[int, int]) -> None:
    """All stages know it: each has read the samples. In the first step none waits for all of them."""
    orders: dict[tuple[int, int], list[int]] = {}

    def hear(span: Span) -> None:
        if (span.name, span.phase) == ("F", "begin"):
            orders.setdefault((span.rank, span.step), []).append(span.index)

    undo = subscribe(hear)
    try:
        job, (stages, replicas) = setup(policy="adaptive", size=12), shape
        found = job.losses(stages, replicas, steps=by_depth(3, 4))
    finally:
        undo()
    assert worst(found, train_plainly(job, len(found), whole_batch=False, weigh=targets).curve) < 1e-5
    source = SampleSource(Sentences(), seed=0, collate=padded)
    for (_, step), order in orders.items():
        mine = sorted(order)
        lengths = [-variant_of(job.model, source.micro_batch([12 * step + j]).tensors, ()) for j in mine]
        assert order == (mine if step == 0 else [mine[position] for position in by_work(lengths, stages)])
    assert any(order != sorted(order) for order in orders.values())


class OneFails(Sentences):
    """A sample of the second step is damaged."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == sample_index(8, size=50, seed=0):
            raise OSError("the sample is damaged")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_ends_the_wait_for_the_order() -> None:
    with pytest.raises(OSError, match="the sample is damaged"):
        setup(policy="adaptive", dataset=OneFails()).run(2, 1)


def test_sections_hold_the_same_state_at_every_length_and_their_graphs_verify() -> None:
    job = setup()
    longest, *others = job.model.variants
    assert longest.facts.sections == job.model.facts.sections
    assert len(others) == 2
    for other in others:
        assert [set(s.parameters) for s in other.sections] == [set(s.parameters) for s in longest.sections]
        crossing = {c.shape(2)[1] for into in other.split.crossings for c in into}
        assert crossing == {other.inputs["input_ids"].shape[0]}
    initial = materialise(job.recipe, 0)
    for position in range(6):
        batch = SampleSource(Sentences(), seed=0, collate=padded).micro_batch([position]).tensors
        found = verify(job.model, job.recipe, initial, batch)
        assert max(found.loss_error, found.gradient_error) < 1e-6
    check_weighing(Experiment(job.model, job.recipe, initial, job.source))


@pytest.mark.nightly
def test_rotary_positions_keep_their_places() -> None:
    recipe = Recipe(partial(tiny_llama, layers=1))
    model = partition_lengths(recipe, {k: v[None].repeat(2, 1) for k, v in Tokens()[0].items()}, (8, 16))
    assert [len(each.sections) for each in model.variants] == [len(model.sections)] * 2


def test_a_length_that_was_not_declared_is_refused_with_the_numbers() -> None:
    job = setup()
    with pytest.raises(DataError, match=r"'input_ids' has length 7 .* \[3, 4\].*lengths=\[6, 12, 16\]"):
        variant_of(job.model, {"input_ids": torch.zeros(2, 7), "labels": torch.zeros(2, 7)}, (3, 4))
    with pytest.raises(DataError, match=r"\[3, 4\] must have one of 'input_ids', 'labels'.* has only 'tokens'\."):
        variant_of(job.model, {"tokens": torch.zeros(2, 7)}, (3, 4))


class Changing(Positions):
    """A layer more for long inputs."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if input_ids.shape[1] > 8:
            return super().forward(input_ids, labels)
        return nn.functional.cross_entropy(self.head(self.embed(input_ids)).flatten(0, 1), labels.flatten())


@pytest.mark.nightly
def test_lengths_that_change_the_model_are_refused() -> None:
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.zeros(2, 6, dtype=torch.long)}
    with pytest.raises(ModelError, match="operations differ"):
        partition_lengths(Recipe(Changing), batch, (6, 12))
    with pytest.raises(UsageError, match="first samples must have one of these lengths"):
        partition_lengths(Recipe(Positions), batch, (8, 12))


@pytest.mark.parametrize("lengths", [[], [0], "12", [3, 3], [1.5]])
def test_odd_declarations_are_refused(lengths: Any) -> None:
    with pytest.raises(UsageError, match="lengths="):
        check_lengths(lengths)
