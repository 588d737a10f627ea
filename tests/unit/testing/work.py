"""What the ranks of a run have in their sums of one step, from what they are seen to do: nothing that they say."""

import threading
from collections import defaultdict

from varuna.engine.base.spans import Span

Numbers = frozenset[int]


class Work:
    """Backwards of one step by worker and stage, in every generation, and what a loss leaves of them."""

    def __init__(self, step: int, micro_batches: int) -> None:
        self._step, self._all = step, frozenset(range(micro_batches))
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}  # by rank of the newest generation
        self._generation = -1
        self._left: dict[int, Numbers] = {}  # by stage: what some sums have since before this generation
        self._done: dict[tuple[int, int], set[int]] = defaultdict(set)  # by thread and stage
        self._lost: set[int] = set()
        self._reduced: set[int] = set()  # stages that have summed a section over replicas in this generation
        self._alone: set[int] = set()  # or in one before: then one rank goes on from that sum, and no other has it
        self.ran: dict[int, set[int]] = defaultdict(set)
        """by generation: micro-batches whose forward ran anywhere"""

    def hear(self, span: Span) -> None:
        """Note it."""
        with self._lock:
            if span.name == "form" and span.phase == "begin":
                if span.index > self._generation:
                    self._generation, self._threads = span.index, {}
                    self._left = self._survives()
                    self._alone |= self._reduced
                    self._reduced = set()
                self._threads[span.rank] = threading.get_ident()
            elif span.step == self._step and span.name == "F" and span.phase == "begin":
                self.ran[self._generation].add(span.index)
            elif (span.step, span.phase) == (self._step, "end") and span.name in ("B", "W"):
                new = {span.index} - self._left.get(span.stage, Numbers())
                self._done[threading.get_ident(), span.stage] |= new

            elif (span.step, span.phase, span.name) == (self._step, "end", "sum"):
                self._reduced.add(span.stage)

    def lose(self, rank: int) -> None:
        """A worker is gone, with its sums."""
        with self._lock:
            self._lost.add(self._threads[rank])

    def lacking(self, stages: int, lost: int) -> int:
        """How many micro-batches some stage has in no sums of a worker that lives, at most; ``lost`` has lost one."""
        with self._lock:
            if lost in self._alone:
                return len(self._all)
            survives = self._survives()
        return len(self._all - Numbers.intersection(*(survives.get(stage, Numbers()) for stage in range(stages))))

    def _survives(self) -> dict[int, Numbers]:
        found: dict[int, set[int]] = defaultdict(set)
        for (thread, stage), numbers in self._done.items():
            if thread not in self._lost:
                found[stage] |= numbers
        return {stage: frozenset(numbers) for stage, numbers in found.items()}
