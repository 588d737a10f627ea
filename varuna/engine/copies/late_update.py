"""The update of another rank's stage made again here: what it made was lost with that rank, what it read was copied.

A worker that dies just after a vote takes the state after it along. If its keeper has the state before, the sums of all
micro-batches and the totals of tied gradients, then these and the vote make the same state once more, in host memory.
"""

from dataclasses import replace

from varuna.checkpoint.io.frozen import with_stand_ins, without_stand_ins
from varuna.checkpoint.io.section_state import SectionState
from varuna.core.errors import LinkError
from varuna.core.messages import Assignment, Vote
from varuna.core.model import Memory
from varuna.core.plan import Plan
from varuna.core.sums import StepAssignment
from varuna.engine.copies.keeping import RecoverableStep
from varuna.engine.device.host_copies import HOST
from varuna.engine.links.traffic import TransferPaths
from varuna.engine.pipeline.apply import apply_vote
from varuna.engine.stage.job import Job
from varuna.engine.stage.stage import Stage
from varuna.engine.stage.sums import ResumedStep


def can_be_made(job: Job, plan: Plan, left: RecoverableStep, vote: Vote) -> bool:
    """Whether the update of a step can be made again from what is left of it, and its vote."""
    everything = ((0, plan.micro_batches),)
    trained = [each for each in left.states if not job.model.trainable.isdisjoint(job.model.sections[each].parameters)]
    held = {section: copied.held.copies[0].micro_batches for section, copied in left.sums.items()}
    return vote.is_whole and vote.step == left.step and all(held.get(section) == everything for section in trained)


def made_again(job: Job, plan: Plan, owner: int, left: RecoverableStep, vote: Vote) -> dict[int, SectionState]:
    """The states after a step's update, by section; the memory of those before is taken over.

    Args:
        job: what the user asked for.
        plan: of the generation in which the step ran.
        owner: rank whose states they were.
        left: what is left of the step.
        vote: on it.

    Raises:
        LinkError: the update fails here.
    """
    place = plan.place_of(owner)
    # On the device there may be room for the stage of one rank only.
    here = replace(job, device=HOST, traffic=TransferPaths(), compiler=None, memory=Memory())
    flats = {section: copied.values for section, copied in left.sums.items()}
    states = {section: with_stand_ins(state, job.model.shapes) for section, state in left.states.items()}
    begun = ResumedStep(StepAssignment(work=(), taken=(), kept=()), flats)
    try:
        stage = Stage(here, plan, place.stage, states, left.step, replica=place.replica, begun=begun)
        for name, total in left.totals.items():
            if name in stage.totals.views:
                stage.totals.take(name, total.view(stage.totals.views[name].shape))
        apply_vote(stage, vote.step, vote.vector)
    except Exception as error:  # of the user's optimizer, which may want a device
        raise LinkError(
            f"the update of rank {owner}, which was lost with it, cannot be made again here: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {section: without_stand_ins(stage.state_of(section), state) for section, state in left.states.items()}


def needed(assignment: Assignment) -> frozenset[int]:
    """Sections of which a rank needs the state that it has, for itself or for others."""
    if not assignment.goes_on:
        return frozenset()
    mine = range(0) if assignment.is_spare else assignment.plan.sections_at(assignment.rank)
    come = {each.section for each in assignment.transfers if each.target_rank == assignment.rank}
    go = {each.section for each in assignment.transfers if each.source_rank == assignment.rank}
    return frozenset(go | (set(mine) - come))
