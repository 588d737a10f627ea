"""Sums that a simulated worker says it has of a broken step."""

from collections.abc import Sequence

from varuna.core.messages import Assignment
from varuna.core.plan import Copies
from varuna.core.sums import HeldSums, joined
from varuna.extras.replay.broken_steps import BrokenSteps
from varuna.extras.replay.life import Life, SimulatedWorker


def held_sums(
    worker: SimulatedWorker,
    members: Sequence[SimulatedWorker],
    assignment: Assignment,
    life: Life,
    broken_steps: BrokenSteps,
) -> HeldSums | None:
    """Return a worker's own sums, and those of the rank whose copies it keeps; note which sections it has copies of.

    A replica that lost a rank came as far as it was then: the others can do little without it.

    Args:
        worker: it has a seat.
        members: of the generation, by rank.
        assignment: the worker's.
        life: of the generation; its step has begun and is broken off.
        broken_steps: of the job.
    """
    assert life.began_s is not None
    assert life.held_s is not None
    plan, began_s, held_s = assignment.plan, life.began_s, life.held_s
    stopped_s = []
    for replica in range(plan.replicas):
        ranks = plan.ranks_of(replica)
        stopped_s.append(min(life.gone_s.get(members[rank].name, held_s) for rank in ranks) - began_s)
    is_first = life.step == assignment.next_step
    found = [broken_steps.held(plan, assignment.rank, assignment.rest if is_first else None, stopped_s)]
    owner = assignment.copy_from
    if owner is not None and life.kept_s <= life.gone_s.get(members[owner].name, held_s) - began_s:
        until_s = stopped_s[plan.place_of(owner).replica]
        worker.copied = frozenset(plan.sections_at(owner)) if plan.copies is Copies.STATE else frozenset()
        its = members[owner].assignment
        rest = its.rest if its is not None and is_first else None
        found.append(broken_steps.copied(plan, owner, rest, state_complete_s=life.kept_s, until_s=until_s))
    return joined([each for each in found if each is not None])
