"""Back to a memory checkpoint: the newest step of which workers that live have all state. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from varuna.core.messages import HeldCheckpoint
from varuna.fleet.machine.placement import Holdings, uncovered
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.worker import WorkerInventory


class MemoryCheckpoint(NamedTuple):
    """State of all sections in workers' memory."""

    step: int
    """steps that it contains"""
    holdings: Holdings

    def holders(self) -> Counter[int]:
        """Count the workers that have each section."""
        return Counter(section for sections in self.holdings.values() for section in sections)


def in_memory(fleet: Fleet, workers: Iterable[str]) -> Sequence[MemoryCheckpoint]:
    """The memory checkpoints that these workers have among them, the newest first."""
    assert fleet.job is not None
    by_step: defaultdict[int, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in workers:
        for each in (fleet.workers[name].holding or WorkerInventory()).checkpoints:
            if _counts(fleet, each):
                by_step[each.step][name].update(each.sections)
    found = [
        MemoryCheckpoint(step, {name: frozenset(sections) for name, sections in by_step[step].items()})
        for step in sorted(by_step, reverse=True)
    ]
    return [each for each in found if not uncovered(len(fleet.job.model.sections), each.holdings)]


def still_needed(found: Sequence[MemoryCheckpoint]) -> tuple[int, ...]:
    """Steps of those that a next loss may send the run back to: the newest, and one of which more may be lost.

    The newest may not have come to all keepers yet.

    Args:
        found: the newest first.
    """
    if not found:
        return ()
    newest = found[0].holders()
    older = next((each.step for each in found[1:] if any(n > newest[s] for s, n in each.holders().items())), None)
    return (found[0].step,) if older is None else (found[0].step, older)


def _counts(fleet: Fleet, held: HeldCheckpoint) -> bool:
    """Return whether its step is of this timeline: none that a rollback took back, even if it was done again."""
    if held.generation < fleet.generations.began:
        return False
    since = fleet.history[held.generation + 1 - fleet.generations.began :]
    return held.step <= fleet.recorded.step + 1 and all(
        record.first_step >= held.step for record in since if record.rollback
    )
