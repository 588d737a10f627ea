"""Assignments of a new generation's members: each is told its own part, and nothing that grows with the fleet."""

from collections.abc import Iterator, Mapping, Sequence

from varuna.core.messages import Assignment, Transfer
from varuna.core.sums import MicroBatchLoss
from varuna.fleet.state.run_events import GenerationRecord


def assignments(
    history: Sequence[GenerationRecord], moves: Sequence[Transfer], losses: Mapping[int, MicroBatchLoss]
) -> Iterator[tuple[str, Assignment]]:
    """Each member of the newest generation in ``history``, with its part in it.

    Args:
        history: all generations.
        moves: those of all ranks.
        losses: by micro-batch, what is known of a step that was broken off.
    """
    record = history[-1]
    own: dict[int, list[Transfer]] = {}
    for move in moves:
        for rank in (move.source_rank, move.target_rank):
            own.setdefault(rank, []).append(move)
    lost, left = _lost_replicas(history), record.remainder
    known = [losses[number] for number in sorted(losses)]
    for rank, name in enumerate(record.members):
        yield (
            name,
            Assignment(
                generation=record.generation,
                plan=record.plan,
                rank=rank,
                members=len(record.members),
                next_step=record.first_step,
                transfers=tuple(own.get(rank, ())),
                rest=None if left is None else left.rest_of(record.plan, rank, known),
                lost_replicas=lost.get(name, ()),
                copy_to=record.copied_to(rank),
                copy_from=record.copied_from(rank),
                checkpoint=record.checkpoint,
                fresh=record.rollback and record.checkpoint is None and not record.from_memory,
                from_memory=record.from_memory,
                memory_steps=record.memory_steps,
                losses_per_hour=record.losses_per_hour,
            ),
        )


def _lost_replicas(history: Sequence[GenerationRecord]) -> Mapping[str, tuple[int, ...]]:
    """For each rank's worker of the newest generation that trained: replicas that have lost its sections since."""
    trained = next((record for record in reversed(history[:-1]) if record.recovery_seconds is not None), None)
    if trained is None:
        return {}
    plan, here = trained.plan, history[-1].ranks
    gone: dict[int, set[int]] = {section: set() for section in range(plan.sections)}
    for rank, name in enumerate(trained.grid):
        if name not in here:
            for section in plan.sections_at(rank):
                gone[section].add(plan.place_of(rank).replica)
    if not any(gone.values()):
        return {}
    return {
        name: tuple(sorted(set[int]().union(*(gone[section] for section in plan.sections_at(rank)))))
        for rank, name in enumerate(trained.grid)
    }
