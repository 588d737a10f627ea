"""Contents of sums at a moment of a step, as a replay sees them; and what they are worth."""

from dataclasses import replace

import pytest

from tests.depth import by_depth
from tests.unit.extras.replay.models import make_calibration
from tests.unit.extras.replay.test_replay import FREE, replay, trace
from varuna.core.plan import Pipeline, Plan
from varuna.core.sums import HeldSums, IndexSet, InheritedSum, SectionSum, StepAssignment, count, numbers_of
from varuna.extras.replay.broken_steps import BrokenSteps
from varuna.extras.replay.job import job_of
from varuna.extras.replay.lost import LostBy
from varuna.extras.replay.replay import Replay
from varuna.extras.replay.saved import StepSaves

CALIBRATION = make_calibration()
SECTIONS = 8
PLAN = Plan(
    micro_batch=1,
    global_batch=64,
    pipelines=(Pipeline(replicas=2, bounds=(0, 2, 4, 6, SECTIONS), stash_limits=(32,) * 4),),
    step_s=10.0,
)


@pytest.fixture(scope="module")
def steps() -> BrokenSteps:
    return BrokenSteps(job_of(CALIBRATION, 64, 1), CALIBRATION)


def held(
    steps: BrokenSteps, rank: int, stopped_s: tuple[float, float], rest: StepAssignment | None = None, plan: Plan = PLAN
) -> dict[int, IndexSet]:
    found = steps.held(plan, rank, rest, stopped_s)
    return {} if found is None else {each.section: each.micro_batches for each in found.sections}


def test_a_rank_has_what_its_backwards_have_added(steps: BrokenSteps) -> None:
    """All sections of a stage alike, the last stage first, and only of this replica's micro-batches."""
    by_stage = [held(steps, stage, (5.0, 5.0)) for stage in range(4)]
    first, last = by_stage[0][0], by_stage[3][6]
    assert by_stage[0] == {0: first, 1: first}
    assert 0 < count(first) < count(last) < 32
    assert set(numbers_of(last)) < set(range(32))
    assert set(numbers_of(held(steps, 7, (5.0, 5.0))[6])) < set(range(32, 64))
    assert held(steps, 3, (0.0, 5.0)) == {}


def test_sums_are_full_once_every_replica_has_come_to_its_end(steps: BrokenSteps) -> None:
    assert held(steps, 0, (10.0, 10.0)) == {0: ((0, 64),), 1: ((0, 64),)}
    assert held(steps, 0, (10.0, 6.0)) == {0: ((0, 32),), 1: ((0, 32),)}


def test_the_last_stage_knows_losses_that_are_in_no_sum_yet(steps: BrokenSteps) -> None:
    found = steps.held(PLAN, 3, None, (5.0, 5.0))
    assert isinstance(found, HeldSums)
    assert len(found.losses) >= count(found.sections[0].micro_batches)
    assert steps.held(PLAN, 0, None, (5.0, 5.0)) is not None
    assert not steps.held(PLAN, 0, None, (5.0, 5.0)).losses  # type: ignore[union-attr]


def test_what_was_inherited_is_still_there_and_not_added_again(steps: BrokenSteps) -> None:
    rest = StepAssignment(
        work=((0, 8), (30, 32)),
        taken=(InheritedSum(section=0, micro_batches=((8, 30),), source_rank=0),),
        kept=tuple(SectionSum(section=section, micro_batches=((4, 30),)) for section in (0, 1)),
    )
    whole_s = steps.seconds(PLAN, [rest.work, ((32, 40),)])
    assert whole_s == steps.seconds(PLAN, [((0, 10),)]) < PLAN.step_s / 2
    assert held(steps, 0, (0.0, 0.0), rest) == {0: ((8, 30),)}
    assert held(steps, 0, (whole_s, 0.0), rest) == {0: ((0, 4), (8, 32)), 1: ((0, 4), (30, 32))}


@pytest.mark.parametrize("spares", by_depth([0], [1, 0]))
def test_a_loss_costs_what_the_sums_lack(spares: int) -> None:
    """4x3 loses a worker late in a step; a spare takes its seat, or the plan becomes 8x1, and sums move."""
    nodes = [f"n{number}" for number in range(12 + spares)]
    lost = trace((0, nodes, ()), (634.9, (), nodes[5:6]), end_s=900)
    kept = replay(lost).morphing(FREE)
    again = replay(lost).morphing(replace(FREE, keeps_sums=False))
    assert kept.stretches[-1].plan is not None
    assert kept.stretches[-1].plan.shape == ("4x3" if spares else "8x1")
    assert again.micro_batches_kept == 0
    assert 0.3 * kept.micro_batches < kept.micro_batches_kept < kept.micro_batches
    assert kept.steps_redone == again.steps_redone == 1
    assert kept.samples >= again.samples
    assert kept.training_share / kept.steps < again.training_share / again.steps


def test_saves_in_a_step_are_complete_some_time_after_they_begin() -> None:
    saves = StepSaves(step=3, first_s=100.0, every_s=60.0, write_s=5.0)
    assert [saves.newest_s(until_s) for until_s in (99, 104, 105, 169, 170, 235)] == [None, None, 100, 100, 165, 230]


@pytest.mark.nightly
def test_a_run_that_loses_all_its_workers_goes_on_with_what_was_saved_of_the_step() -> None:
    """Four nodes go at once, and others come."""
    lost = trace((0, "abcd", ()), (3000, (), "abcd"), (3300, "efgh", ()), end_s=9000)
    long = Replay(lost, CALIBRATION, gpus_per_node=1, global_batch=2**12)
    costs = replace(FREE, checkpoints=True, copies=False)
    kept, void = long.morphing(costs), long.morphing(replace(costs, keeps_sums=False))
    assert kept.micro_batches_kept > 0
    assert void.micro_batches_kept == 0
    assert kept.lost[LostBy.BROKEN.value] < void.lost[LostBy.BROKEN.value]
