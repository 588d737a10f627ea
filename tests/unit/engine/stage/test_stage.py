"""A stage's state is all there is to it: applied once per step, exported, and rebuilt to the same bits."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.ranks import Setup
from varuna.checkpoint.io.section_state import SectionState, from_bytes, to_bytes
from varuna.core.plan import Pipeline, Plan
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Patience
from varuna.engine.links.groups import Groups
from varuna.engine.pipeline.reduce import Reducer
from varuna.engine.stage.job import Job
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.stored import initial_states
from varuna.partition.initial.constructor import materialise


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.5, momentum=0.9)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(build=SmallLanguage, dataset=Tokens(padded=True))


def job_with(setup: Setup, optimizer: Callable[[Any], torch.optim.Optimizer], **changes: Any) -> Job:
    given: dict[str, Any] = {"scheduler": None, "clip_grad_norm": None, "before_step": None, "buffers": {}, **changes}
    return Job(model=setup.model, optimizer=optimizer, seed=0, **given)


def plan_of(setup: Setup, stages: int) -> Plan:
    sections = len(setup.model.sections)
    return Plan(
        micro_batch=2,
        global_batch=4,
        pipelines=(
            Pipeline(
                bounds=(*tuple(stage * sections // stages for stage in range(stages)), sections),
                stash_limits=(1,) * stages,
            ),
        ),
    )


def whole(setup: Setup, job: Job) -> Stage:
    """All sections on one stage, at step 0."""
    every = range(len(setup.model.sections))
    states = initial_states(setup.model, every, setup.beginning.parameters, job.buffers)
    return Stage(job, plan_of(setup, 1), 0, states, 0)


def gradients_of(setup: Setup, stage: Stage, step: int) -> None:
    """F, B and the sums of tied parameters of a step, on a single stage."""
    reducer = Reducer(stage, stage.plan, 0, Groups(cast(Any, None)), Inbox(Patience(last_s=10)))
    stage.clear_gradients()
    for micro_batch in range(2):
        first = 4 * step + 2 * micro_batch
        examples = Examples(setup.source.micro_batch([first, first + 1]).tensors, 2)
        tapes = stage.record({}, examples, step, micro_batch)
        loss = setup.model.sections[-1].makes[0]
        stage.backward(tapes, {loss: torch.ones(())}, lambda section: None)
    for section in reversed(stage.sections):
        reducer.section_done(step, section)
    reducer.finish(step)
    reducer.close()


def train(setup: Setup, stage: Stage, steps: range) -> None:
    for step in steps:
        gradients_of(setup, stage, step)
        stage.apply(step, 0.5)


def exported(stage: Stage) -> dict[int, SectionState]:
    """The state of each section as another process gets it."""
    return {section: from_bytes(to_bytes(stage.state_of(section))) for section in stage.sections}


def copies(stage: Stage) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in stage.parameters.items()}


def test_a_step_is_applied_once_whatever_is_asked_again(setup: Setup) -> None:
    seen: list[int] = []
    stage = whole(setup, job_with(setup, sgd, before_step=lambda named: seen.append(len(named))))
    before = copies(stage)
    gradients_of(setup, stage, 0)
    stage.apply(0, 0.5)
    after = copies(stage)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for _ in range(2):
        stage.apply(0, 0.5)
    assert all(torch.equal(value, after[name]) for name, value in copies(stage).items())
    assert stage.next_step == 1
    assert seen == [len(after)]


def test_a_step_can_not_be_skipped(setup: Setup) -> None:
    with pytest.raises(AssertionError, match="step 1 cannot be applied on top of 0"):
        whole(setup, job_with(setup, sgd)).apply(1, 1.0)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_stage_rebuilt_from_exported_states_continues_bit_for_bit(
    setup: Setup, optimizer: Callable[[Any], torch.optim.Optimizer], scheduled: bool
) -> None:
    def halving(built: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(built, step_size=1, gamma=0.5)

    job = job_with(setup, optimizer, scheduler=halving if scheduled else None)
    undisturbed = whole(setup, job)
    train(setup, undisturbed, range(2))
    rebuilt = Stage(job, plan_of(setup, 1), 0, exported(undisturbed), 2)
    assert rebuilt.optimizer.lr == undisturbed.optimizer.lr
    train(setup, undisturbed, range(2, 3))
    train(setup, rebuilt, range(2, 3))
    for section in undisturbed.sections:
        one, other = undisturbed.state_of(section), rebuilt.state_of(section)
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
        assert one.scalars == other.scalars


def test_states_survive_a_way_through_stages_of_another_depth(setup: Setup) -> None:
    job = job_with(setup, adamw)
    undisturbed = whole(setup, job)
    train(setup, undisturbed, range(2))
    states, deep = exported(undisturbed), plan_of(setup, 3)
    returned: dict[int, SectionState] = {}
    for index in range(3):
        mine = {section: states[section] for section in deep.first.sections_of(index)}
        returned.update(exported(Stage(job, deep, index, mine, 2)))
    rebuilt = Stage(job, plan_of(setup, 1), 0, returned, 2)
    train(setup, undisturbed, range(2, 3))
    train(setup, rebuilt, range(2, 3))
    expected = copies(undisturbed)
    assert all(torch.equal(value, expected[name]) for name, value in copies(rebuilt).items())


def test_owned_only_leaves_out_tied_copies_of_another_section(setup: Setup) -> None:
    [tied] = setup.model.facts.tied
    first, last = tied.sections
    stage = whole(setup, job_with(setup, adamw))
    train(setup, stage, range(1))
    key = f"parameters/{tied.name}"
    assert key in stage.state_of(first, owned_only=True).tensors
    assert key in stage.state_of(last).tensors
    lean = stage.state_of(last, owned_only=True)
    assert not [name for name in (*lean.tensors, *lean.scalars) if tied.name in name]
    every = [name for s in stage.sections for name in stage.state_of(s, owned_only=True).tensors]
    assert len(every) == len(set(every))
    assert {name.removeprefix("parameters/") for name in every if name.startswith("parameters/")} == set(
        dict(SmallLanguage().named_parameters())
    )


def test_state_is_a_view_and_not_a_copy(setup: Setup) -> None:
    stage = whole(setup, job_with(setup, sgd))
    name, parameter = stage.named_parameters()[0]
    assert stage.state_of(0).tensors[f"parameters/{name}"].data_ptr() == parameter.data_ptr()


def test_the_norm_counts_a_tied_parameter_once_and_is_that_of_the_whole_model(setup: Setup) -> None:
    stage = whole(setup, job_with(setup, sgd))
    gradients_of(setup, stage, 0)
    model = materialise(setup.recipe, 0).module
    for first in (0, 2):
        model(**setup.source.micro_batch([first, first + 1]).tensors).backward()
    expected = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert sum(stage.squared_norms().values()) == pytest.approx(expected, rel=1e-5)
