"""Batches that are no stacks of samples train as in a plain loop, in any plan; or are refused before step 0."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import varuna
from tests.depth import nightly, of_depth
from tests.unit.testing.joined import (
    JOBS,
    SIZE,
    OfGraphs,
    OfLists,
    Packed,
    Samples,
    flattened,
    picture,
    total,
)
from varuna.core.errors import ModelError, UsageError, VarunaError
from varuna.data import sample_index
from varuna.testing import fail_at, run

_REL = 2e-6
LOOKED_AT = 16
"""Samples, from which open sizes are found."""


@pytest.mark.parametrize("name", of_depth(JOBS, {"packed", "graphs and nodes", "boxes", "missing, two terms"}))
def test_a_job_trains_as_a_plain_loop_in_three_stages_of_which_one_dies(name: str) -> None:
    job = JOBS[name]
    fault = fail_at(rank=1, step=2, phase="B")
    outcome = run(job.script, workers=3, stages={3: 3, 2: 2}, faults=[fault])
    assert outcome.plans == ("3x1", "2x1")
    assert outcome.losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


@pytest.mark.parametrize("name", ["graphs and nodes", *nightly("packed", "lists", "missing, two terms", "nests")])
def test_two_replicas_with_several_samples_in_a_micro_batch_train_as_a_plain_loop(name: str) -> None:
    job = replace(JOBS[name], micro_batch=2)
    outcome = run(job.script, workers=2, stages=1)
    assert outcome.plans == ("1x2",)
    assert outcome.losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


def test_a_batch_may_be_one_micro_batch_of_two_stages() -> None:
    job = replace(JOBS["packed"], micro_batch=8)
    assert run(job.script, workers=2, stages=2).losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


@pytest.mark.nightly
def test_a_whole_batch_may_have_no_sample_that_is_there_in_a_micro_batch() -> None:
    """Samples 2, 7, 12... are None: of micro-batches of one sample, some have none."""
    job = replace(JOBS["missing"], micro_batch=1)
    assert run(job.script, workers=2, stages=2).losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


@pytest.mark.nightly
def test_evaluation_weighs_joined_samples_as_training_does() -> None:
    job = JOBS["graphs and nodes"]

    def script() -> float:
        trainer = job.trainer()
        for _ in trainer.steps(1):
            pass
        return trainer.evaluate(job.samples, examples=8).loss

    first, second = run(script, workers=2, stages=2).returned, run(script).returned
    assert [*first.values()] == pytest.approx([second["w0"]] * 2, rel=_REL, abs=1e-7)


# -- refused before step 0, with a way out that works -----------------------------------------------------------


class Meeting(Packed):
    """Attention over the whole row, whoever's tokens it has."""

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.embed(ids) + self.place(positions))
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], is_causal=True)[:, 0]
        return F.cross_entropy(self.head(self.second(x)).flatten(0, 1), labels.flatten())


def test_samples_that_meet_in_a_packed_row_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"forward\(\) itself must keep them apart.*position_ids.*per_micro_batch=True"
    ):
        run(replace(JOBS["packed"], model=Meeting).script)


@pytest.mark.nightly
def test_samples_may_meet_within_a_micro_batch_that_the_user_fixed() -> None:
    job = JOBS["packed"]

    def script() -> None:
        loss = varuna.Loss(per_micro_batch=True)
        build = replace(job, model=Meeting).build
        trainer = varuna.Trainer(build, job.samples, _sgd, 8, collate=flattened, micro_batch=8, loss=loss)
        for _ in trainer.steps(4):
            pass

    assert run(script).losses == pytest.approx(replace(job, model=Meeting).plainly(), rel=_REL, abs=1e-7)


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.2, momentum=0.9)


class Counting(OfGraphs):
    """The number of graphs as PyTorch Geometric finds it, which is a number of Python's."""

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        x = self.nodes(x, edges)
        count = int(batch.max()) + 1
        return F.cross_entropy(self.head(x.new_zeros(count, x.shape[1]).index_add(0, batch, x)), y)


class Sized(OfGraphs):
    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        x = self.nodes(x, edges)
        return F.cross_entropy(self.head(x.new_zeros(y.shape[0], x.shape[1]).index_add(0, batch, x)), y)


def test_a_number_of_graphs_that_is_read_from_the_data_is_refused_and_a_size_is_not() -> None:
    with pytest.raises(ModelError, match=r"int\(batch.max\(\)\) \+ 1.*size=y.shape\[0\]"):
        run(replace(JOBS["graphs"], model=Counting).script)
    job = replace(JOBS["graphs"], model=Sized)
    assert run(job.script).losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


def test_lists_of_which_two_alone_are_looked_at_train_as_a_plain_loop() -> None:
    job = replace(JOBS["lists"], micro_batch=8)
    assert run(job.script).losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


@pytest.mark.parametrize("name", ["bare lists", "lists of equal shapes"])
def test_lists_train_as_a_plain_loop_whatever_their_shapes_are(name: str) -> None:
    job = JOBS[name]
    assert run(job.script, workers=3, stages=3).losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


def test_shapes_of_a_list_may_be_equal_later_that_were_not_in_the_samples_that_are_looked_at() -> None:
    place = {sample_index(position, size=SIZE, seed=0): position for position in range(SIZE)}

    def boxes(index: int, draws: torch.Generator) -> Any:
        return picture(place[index] if place[index] < LOOKED_AT else 1, draws)

    job = replace(JOBS["bare lists"], samples=Samples(boxes))
    assert run(job.script).losses == pytest.approx(job.plainly(), rel=_REL, abs=1e-7)


class Squared(OfLists):
    def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
        return {"loss": total(super().forward(images, targets), None).square()}


def test_lists_as_long_as_the_samples_that_are_looked_at_are_compared_with_others() -> None:
    job = replace(JOBS["lists"], model=Squared)

    def script() -> None:
        trainer = varuna.Trainer(job.build, job.samples, _sgd, 32, collate=job.collate, loss=total, micro_batch=16)
        next(iter(trainer.steps(1)))

    with pytest.raises(ModelError, match="the loss of a batch is not the mean of its parts"):
        run(script)


def test_lists_of_samples_must_divide_the_global_batch() -> None:
    with pytest.raises(UsageError, match=r"micro_batch=3 of them does not divide global_batch=8"):
        run(replace(JOBS["lists"], micro_batch=3).script)


def test_a_prediction_of_joined_samples_is_refused() -> None:
    job = JOBS["nodes"]

    def script() -> None:
        trainer = job.trainer()
        for _ in trainer.steps(1):
            trainer.predict(job.samples, output=lambda output, batch: output, examples=4)

    with pytest.raises(VarunaError, match="predictions are rows, one for each sample"):
        run(script)
