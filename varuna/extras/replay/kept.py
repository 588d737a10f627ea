"""Memory checkpoints in a replay: when they are made, and who has what of them."""

from collections.abc import Sequence

from varuna.core.messages import HeldCheckpoint
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.extras.replay.job import state_bytes
from varuna.extras.replay.life import SimulatedWorker
from varuna.schedule.copy_pace import checkpoint_every_s, checkpoint_stall_s, state_copying_s


class KeptStates:
    """The memory checkpoints of one generation: one at a time, by the engine's pace.

    Args:
        plan: that runs.
        job: says how large sections are.
        link_bytes_per_s: of the link to a keeper.
        snapshot_bytes_per_s: rate at which state is copied aside.
        losses_per_hour: that were seen.
    """

    def __init__(
        self,
        plan: Plan,
        job: JobFacts,
        *,
        link_bytes_per_s: float,
        snapshot_bytes_per_s: float,
        losses_per_hour: float,
    ) -> None:
        each_bytes = state_bytes(job)
        largest_bytes = max(sum(each_bytes[section] for section in slot.sections) for slot in plan.slots)
        aside_s = largest_bytes / snapshot_bytes_per_s
        self.stall_s = checkpoint_stall_s(aside_s, plan.step_s, on_device=job.memory_apart)
        self._every_s = checkpoint_every_s(
            largest_bytes, self.stall_s, on_device=job.memory_apart, losses_per_hour=losses_per_hour
        )
        sending_s = state_copying_s(largest_bytes, link_bytes_per_s, max(self._every_s, plan.step_s))
        self.takes_s = aside_s - self.stall_s + sending_s
        self._due_s, self._is_over = float("inf"), False

    def is_due(self, now_s: float) -> bool:
        """Return whether the next one is due."""
        return now_s >= self._due_s and self._is_over

    def begin(self, workers: Sequence[SimulatedWorker], plan: Plan, step: int, generation: int, now_s: float) -> None:
        """Let each worker copy its own state aside."""
        self._due_s, self._is_over = now_s + self._every_s, False
        for rank, worker in enumerate(workers):
            own = set(plan.sections_at(rank))
            older = (each for each in worker.checkpoints if each.step != step or not own.issuperset(each.sections))
            worker.checkpoints = (*older, _held(generation, step, own))

    def end(self, workers: Sequence[SimulatedWorker], plan: Plan, step: int, generation: int) -> None:
        """Let all keepers have it, and drop older ones."""
        self._is_over = True
        keeper_of = {worker.assignment.copy_to: rank for rank, worker in enumerate(workers) if worker.assignment}
        for rank, worker in enumerate(workers):
            owner = keeper_of.get(rank)
            sections = {*plan.sections_at(rank), *(() if owner is None else plan.sections_at(owner))}
            worker.checkpoints = (_held(generation, step, sections),)


def _held(generation: int, step: int, sections: set[int]) -> HeldCheckpoint:
    return HeldCheckpoint(generation=generation, step=step, sections=tuple(sorted(sections)))
