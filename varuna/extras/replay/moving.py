"""State and sums that move between the ranks of a generation: while it forms, and while its first step runs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from varuna.core.messages import Assignment, Transfer
from varuna.core.model import JobFacts
from varuna.extras.replay.life import SimulatedWorker


class Moves:
    """Bytes that move in one generation. All ranks send and receive at once, so the busiest end of a line decides.

    Args:
        job: says how large sections are.
        link_bytes_per_s: of a line.
    """

    def __init__(self, job: JobFacts, link_bytes_per_s: float) -> None:
        self._sections, self._link_bytes_per_s = job.model.sections, link_bytes_per_s
        # bytes by end of a line, (rank, whether it sends): a rank sends and receives at once
        self._first = Counter[tuple[int, bool]]()
        self._rest = Counter[tuple[int, bool]]()
        self.sources, self.targets = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        """by rank: sections whose optimizer state it sends, or gets, while the first step runs"""

    def add(self, rank: int, transfers: Iterable[Transfer]) -> None:
        """Add a rank's own transfers."""
        for each in transfers:
            section, end = self._sections[each.section], (rank, each.source_rank == rank)
            if each.sums:
                self._first[end] += section.trainable_bytes
                continue
            self._first[end] += section.parameter_bytes
            later = self._rest if each.follows else self._first
            later[end] += section.optimizer_bytes
            if each.follows:
                (self.sources if each.source_rank == rank else self.targets)[rank].add(each.section)

    @property
    def first_s(self) -> float:
        """Seconds that the generation waits for what it computes with."""
        return max(self._first.values(), default=0) / self._link_bytes_per_s

    @property
    def rest_s(self) -> float:
        """Seconds until its first step has everything that the update needs."""
        return max(self._rest.values(), default=0) / self._link_bytes_per_s

    def seat(self, workers: Sequence[SimulatedWorker], assignment: Assignment) -> None:
        """Give each worker of a formed generation what it was sent; it keeps what others may still need."""
        plan = assignment.plan
        for rank, worker in enumerate(workers):
            in_grid, sent = rank < plan.workers, frozenset(self.sources[rank])
            worker.kept = sent | (worker.copied if in_grid and assignment.goes_on else frozenset())
            worker.sums, worker.copied = None, frozenset()
            if not assignment.goes_on:
                worker.checkpoints = tuple(each for each in worker.checkpoints if each.step == assignment.next_step)
            worker.sections = frozenset(plan.sections_at(rank)) - self.targets[rank] if in_grid else frozenset()
            worker.next_step = assignment.next_step if in_grid or sent else None

    def arrived(self, workers: Sequence[SimulatedWorker], assignment: Assignment) -> None:
        """Note that everything is where it is wanted."""
        for rank, worker in enumerate(workers):
            if rank < assignment.plan.workers:
                worker.sections = frozenset(assignment.plan.sections_at(rank))
            else:
                worker.kept, worker.next_step = frozenset(), None
