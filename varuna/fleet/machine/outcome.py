"""The outcome of a training that is over, for workers that had no part in its end. Pure."""

from varuna.core.messages import LastStep, TrainingOver
from varuna.core.vote import VoteLayout
from varuna.fleet.state.fleet import Fleet


def outcome(fleet: Fleet, name: str) -> TrainingOver:
    """Return what a worker is told at the end of the present training."""
    is_main = bool(fleet.history) and name == fleet.members[0]
    return TrainingOver(training=fleet.training, steps=steps_made(fleet), last=last_step(fleet), is_main=is_main)


def steps_made(fleet: Fleet) -> int:
    """Steps of the present training."""
    return max(fleet.recorded.step + 1, fleet.script.left_step)


def last_step(fleet: Fleet) -> LastStep | None:
    """The last step of the present training, for a loop that has not had it.

    None if nothing is known of it, and after a break: then the loops of those who trained have had their last turn
    before the last step, and what ``state=`` names is complete.
    """
    vote = fleet.recorded.votes.get(fleet.recorded.step)
    record = None if vote is None else fleet.record_of(vote.generation)
    if vote is None or record is None or not vote.is_whole or fleet.job is None:
        return None
    plan = record.plan
    layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches, metrics=fleet.job.metrics)
    totals = layout.read(vote.vector)
    return None if totals.stop else LastStep(step=vote.step, totals=totals, wall_s=vote.wall_s)
