"""Sums of gradients that a store has of a step in progress, beside the checkpoint that the step began from."""

from collections.abc import Sequence
from typing import NamedTuple

from varuna.core.sums import StoredSum, StoredSums
from varuna.extras.replay.broken_steps import BrokenSteps
from varuna.extras.replay.life import Life, SimulatedWorker
from varuna.fleet.state.questions import Checkpoint


class StepSaves(NamedTuple):
    """Times at which ranks save their sums in the step after a checkpoint: all at the same moments."""

    step: int
    first_s: float
    """seconds until the first save begins"""
    every_s: float
    write_s: float
    """of the rank that takes longest"""

    def newest_s(self, until_s: float) -> float | None:
        """Return when the newest save began that was complete by then; None: there is none."""
        rounds = (until_s - self.write_s - self.first_s) // (self.every_s + self.write_s)
        return None if rounds < 0 else self.first_s + rounds * (self.every_s + self.write_s)


class Stored:
    """The newest checkpoint, and what was saved of the step after it."""

    def __init__(self, broken_steps: BrokenSteps) -> None:
        """Begin with nothing; ``broken_steps`` are of the job."""
        self._broken_steps = broken_steps
        self._saves: StepSaves | None = None
        self.checkpoint: Checkpoint | None = None

    def commit(self, checkpoint: Checkpoint, saves: StepSaves | None) -> None:
        """Note a complete checkpoint; ``saves`` follow in the step after it, if any do."""
        self.checkpoint, self._saves = checkpoint, saves

    def note_end(self, life: Life, members: Sequence[SimulatedWorker], now_s: float) -> None:
        """Note what is saved of the step in flight, as a generation ends or may have."""
        if self.checkpoint is not None and self._saves is not None:
            sums = _stored_sums(self.checkpoint.sums, self._saves, life, members, self._broken_steps, now_s)
            self.checkpoint = self.checkpoint._replace(sums=sums)


def _stored_sums(
    before: StoredSums | None,
    saves: StepSaves,
    life: Life,
    members: Sequence[SimulatedWorker],
    broken_steps: BrokenSteps,
    now_s: float,
) -> StoredSums | None:
    """Return the sums that the store has, if the step after its newest checkpoint was broken off.

    Args:
        before: what earlier generations have saved of the same step.
        saves: of that step.
        life: of the newest generation.
        members: of it, by rank.
        broken_steps: of the job.
        now_s: the time.
    """
    if not life.formed or life.began_s is None or life.step != saves.step:
        return before
    sums = list(before.sums) if before is not None else []
    losses = {each.micro_batch: each for each in (before.losses if before is not None else ())}
    micro_batch = 0
    for worker in members:
        assignment = worker.assignment
        if assignment is None or assignment.is_spare or assignment.generation != life.generation:
            continue
        plan, micro_batch = assignment.plan, assignment.plan.micro_batch
        stopped_s = min(life.gone_s.get(each.name, now_s if life.held_s is None else life.held_s) for each in members)
        taken_s = saves.newest_s(stopped_s)
        if taken_s is None or taken_s < life.began_s:
            continue
        rest = assignment.rest if life.step == assignment.next_step else None
        held = broken_steps.held(plan, assignment.rank, rest, [taken_s - life.began_s] * plan.replicas)
        for each in held.sections if held is not None else ():
            file = f"{life.generation}.{assignment.rank}.{each.section}"
            sums.append(StoredSum(section=each.section, micro_batches=each.micro_batches, file=file))
        losses |= {each.micro_batch: each for each in (held.losses if held is not None else ())}
    known = tuple(losses[number] for number in sorted(losses))
    return StoredSums(micro_batch=micro_batch, sums=tuple(sums), losses=known) if sums else None
