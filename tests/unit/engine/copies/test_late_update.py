"""An update that is made again from copies is the one that was lost, bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.depth import nightly_rows
from tests.unit.engine.models import SmallLanguage, adamw
from tests.unit.engine.ranks import Setup
from varuna.checkpoint.io.frozen import FROZEN, FrozenParameters
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.messages import Vote
from varuna.core.plan import Pipeline, Plan
from varuna.core.sums import HeldSums, SectionSum
from varuna.core.vote import VoteLayout
from varuna.engine.copies.keeping import CopiedSums, RecoverableStep
from varuna.engine.copies.late_update import can_be_made, made_again
from varuna.engine.pipeline.apply import apply_vote
from varuna.engine.stage.job import Job
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.stored import initial_states

MICRO_BATCHES = 2


class Tuned(SmallLanguage):
    """Tied embeddings, and two layers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.layers[1], self.layers[2]):
            layer.requires_grad_(False)


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained_only(named: Any) -> torch.optim.Optimizer:
    return adamw([(name, each) for name, each in named if each.requires_grad])


def one_stage(job: Job) -> Plan:
    sections = len(job.model.sections)
    return Plan(micro_batch=2, global_batch=4, pipelines=(Pipeline(bounds=(0, sections), stash_limits=(1,)),))


def copied(state: SectionState) -> SectionState:
    return replace(state, tensors={name: value.clone() for name, value in state.tensors.items()})


def vote_on(stage: Stage, step: int) -> Vote:
    layout = VoteLayout(sections=stage.plan.sections, micro_batches=MICRO_BATCHES)
    vector = [0.0] * layout.size
    for section, norm in stage.squared_norms().items():
        vector[layout.squared_norm(section)] = norm
    for number in range(MICRO_BATCHES):
        vector[layout.micro_batch(number)], vector[layout.micro_batch(number) + 1] = 3.0, 5.0
    return Vote(generation=0, step=step, vector=tuple(vector), wall_s=1.0, tally=layout.tally(vector))


def with_gradients(stage: Stage, seed: int) -> None:
    """Sums of all micro-batches, and totals of tied gradients, as before a vote."""
    stage.clear_gradients()
    chance = torch.Generator().manual_seed(seed)
    for section, bucket in stage.buckets.items():
        bucket.flat.copy_(torch.randn(bucket.flat.shape, generator=chance))
        for number in range(MICRO_BATCHES):
            with stage.sums.adding(section, number):
                pass
    for name, view in stage.totals.views.items():
        stage.totals.take(name, torch.randn(view.shape, generator=chance))


def left_of(
    stage: Stage, left_out: FrozenParameters, spans: tuple[tuple[int, int], ...] = ((0, MICRO_BATCHES),)
) -> RecoverableStep:
    """What a keeper has of the step."""
    sums = {
        section: CopiedSums(
            HeldSums(micro_batch=2, sections=(), copies=(SectionSum(section=section, micro_batches=spans),)),
            bucket.flat.clone(),
        )
        for section, bucket in stage.buckets.items()
        if bucket.flat.numel()
    }
    states = {section: copied(left_out.of(stage.state_of(section))) for section in stage.sections}
    totals = {name: value.clone() for name, value in stage.totals.apart.items()}
    return RecoverableStep(stage.next_step, states, sums, totals)


@pytest.mark.parametrize(
    ("precision", "offload"),
    [
        ("fp16", True),
        *nightly_rows(("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True), ("fp16", False)),
    ],
)
def test_it_is_the_one_that_was_lost(precision: Any, offload: bool) -> None:
    setup = Setup(
        build=Tuned, optimizer=trained_only, scheduler=scheduled, clip=0.5, precision=precision, offload=offload
    )
    job = setup.job()
    left_out = FrozenParameters(job.model.trainable)
    every = range(len(job.model.sections))
    stage = Stage(
        job, one_stage(job), 0, initial_states(setup.model, every, setup.beginning.parameters, job.buffers), 0
    )
    for step in range(3):
        with_gradients(stage, seed=step)
        vote, left = vote_on(stage, step), left_of(stage, left_out)
        assert can_be_made(job, stage.plan, left, vote)
        made = made_again(job, stage.plan, 0, left, vote)
        apply_vote(stage, step, vote.vector)
        for section in every:
            expected = left_out.of(stage.state_of(section))
            assert made[section].tensors.keys() == expected.tensors.keys()
            for name, value in expected.tensors.items():
                assert torch.equal(made[section].tensors[name], value), (step, section, name)
            assert made[section].scalars == expected.scalars
        marks = [path for state in made.values() for path in state.scalars if path.startswith(FROZEN)]
        assert len(marks) == 4, "weights and biases of two layers are in the files"


def test_it_takes_all_of_the_step_and_its_vote() -> None:
    setup = Setup(build=Tuned, optimizer=trained_only)
    job = setup.job()
    every = range(len(job.model.sections))
    stage = Stage(
        job, one_stage(job), 0, initial_states(setup.model, every, setup.beginning.parameters, job.buffers), 0
    )
    with_gradients(stage, seed=0)
    left_out, vote = FrozenParameters(job.model.trainable), vote_on(stage, 0)
    assert can_be_made(job, stage.plan, left_of(stage, left_out), vote)
    assert not can_be_made(job, stage.plan, left_of(stage, left_out, ((0, 1),)), vote), "a micro-batch is missing"
    assert not can_be_made(job, stage.plan, left_of(stage, left_out)._replace(sums={}), vote)
    assert not can_be_made(job, stage.plan, left_of(stage, left_out), vote.model_copy(update={"step": 1}))
    assert not can_be_made(job, stage.plan, left_of(stage, left_out), vote.shortened())
