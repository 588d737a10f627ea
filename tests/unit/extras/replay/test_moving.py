"""State that a generation waits for, and state that may come while its first step runs."""

import pytest

from tests.unit.extras.replay.models import make_calibration
from varuna.core.messages import Assignment, Transfer
from varuna.core.plan import Pipeline, Plan
from varuna.extras.replay.job import job_of
from varuna.extras.replay.life import SimulatedWorker
from varuna.extras.replay.moving import Moves

JOB = job_of(make_calibration(), 64, 1)
SECTIONS = JOB.model.sections
SECOND = Transfer(section=1, source_rank=0, target_rank=1, follows=True)
THIRD = Transfer(section=2, source_rank=2, target_rank=1, follows=True)


def seated(rank: int) -> Assignment:
    plan = Plan(
        micro_batch=1, global_batch=64, pipelines=(Pipeline(bounds=(0, 1, len(SECTIONS)), stash_limits=(1, 1)),)
    )
    return Assignment(generation=1, plan=plan, rank=rank, members=3, next_step=7)


def moves(*transfers: Transfer) -> Moves:
    found = Moves(JOB, link_bytes_per_s=1e6)
    for rank in range(3):
        found.add(rank, [each for each in transfers if rank in (each.source_rank, each.target_rank)])
    return found


def test_nobody_waits_for_optimizer_state_that_follows() -> None:
    found = moves(SECOND, THIRD)
    assert found.first_s == pytest.approx(sum(SECTIONS[each].parameter_bytes for each in (1, 2)) / 1e6)
    assert found.rest_s == pytest.approx(sum(SECTIONS[each].optimizer_bytes for each in (1, 2)) / 1e6)
    at_once = moves(*(each.model_copy(update={"follows": False}) for each in (SECOND, THIRD)))
    assert at_once.first_s == pytest.approx(found.first_s + found.rest_s)
    assert at_once.rest_s == 0


def test_a_section_is_its_senders_until_all_of_it_has_come() -> None:
    workers = [SimulatedWorker("a", copied=frozenset({5})), SimulatedWorker("b"), SimulatedWorker("leaver")]
    found = moves(SECOND, THIRD)
    found.seat(workers, seated(0))
    first, second, spare = workers
    assert first.sections == {0}
    assert first.kept == {1, 5}
    assert second.sections == frozenset(range(3, len(SECTIONS)))
    assert spare.kept == {2}
    assert (spare.sections, spare.next_step) == (frozenset(), 7)
    found.arrived(workers, seated(0))
    assert second.sections == frozenset(range(1, len(SECTIONS)))
    assert (spare.kept, spare.next_step) == (frozenset(), None)
    assert first.kept == {1, 5}, "until the first update"
