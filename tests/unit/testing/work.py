"""Contents of the sums of a run's ranks in one step, from what the ranks are seen to do: nothing that they say."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from typing import Any

import varuna
from tests.unit.engine.models import Dropping, Tokens, adamw
from varuna.engine.base.spans import Span, subscribe
from varuna.testing import RunResult, run
from varuna.testing.faults import Fault, Phase
from varuna.testing.ranks import Stages

Numbers = frozenset[int]

CAPTURES: list[Any] = []
"""Of all runs of these tests: most have the same model."""


def script(steps: int, micro_batches: int, micro_batch: int = 1, **options: Any) -> Callable[[], list[int]]:
    """Return a training script: a small model with dropout and tied embeddings; ``options`` are a trainer's."""

    def trains() -> list[int]:
        given = {
            "model": Dropping,
            "dataset": Tokens(padded=True),
            "optimizer": adamw,
            "clip_grad_norm": 1.0,
            **options,
        }
        trainer = varuna.Trainer(**given, global_batch=micro_batch * micro_batches, micro_batch=micro_batch)
        return [step.index for step in trainer.steps(steps)]

    return trains


@cache
def alone(steps: int, micro_batches: int, micro_batch: int = 1) -> tuple[float, ...]:
    """Return the losses of that script in one process."""
    return run(script(steps, micro_batches, micro_batch), captures=CAPTURES).losses


def went_back(outcome: RunResult) -> bool:
    return any("ROLLBACK" in text for text in outcome.warnings)


def disturbed(
    script: Callable[[], Any], hear: Callable[[Span], None], shapes: Mapping[int, Stages], faults: Sequence[Fault]
) -> RunResult:
    """A run that loses workers, while ``on_span`` is told what its ranks do.

    Args:
        script: as for ``run``.
        hear: is called with every span.
        shapes: P by the number of workers; it begins with the most.
        faults: as for ``run``.
    """
    undo = subscribe(hear)
    try:
        return run(script, workers=max(shapes), stages=shapes, faults=faults, captures=CAPTURES)
    finally:
        undo()


class OnceOthers(Fault):
    """A worker is lost as it begins a phase that it has begun before, so often, once others have done some backwards.

    What is kept of the step is what the other pipelines have done by then: on a busy machine that might be nothing.
    """

    def __init__(
        self, rank: int, step: int, phase: Phase, often: int = 0, *, others: Sequence[int] = (0,), done: int = 3
    ) -> None:
        super().__init__(rank, step, phase, None, after=often)
        self._lacking, self._changed = Counter(dict.fromkeys(others, done)), threading.Condition()

    def on_span(self, span: Span) -> None:
        """Count the others' backwards."""
        if (span.phase, span.step, span.name) == ("end", self.step, "B") and span.rank in self._lacking:
            with self._changed:
                self._lacking[span.rank] -= 1
                self._changed.notify_all()
        super().on_span(span)

    def is_here(self, span: Span) -> bool:
        """Wait for the others, if this is the place."""
        if not super().is_here(span):
            return False
        with self._changed:
            ready = self._changed.wait_for(lambda: all(lacking <= 0 for lacking in self._lacking.values()), 60)
        assert ready, f"others lack backwards: {self._lacking}"
        return True


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
        """Count the micro-batches that some stage has in no living worker's sums, at most; ``lost`` has lost one."""
        with self._lock:
            if lost in self._alone:
                return len(self._all)
            seats = len(self._threads) // stages * stages
            survives = self._survives({thread for rank, thread in self._threads.items() if rank >= seats})
        return len(self._all - Numbers.intersection(*(survives.get(stage, Numbers()) for stage in range(stages))))

    def _survives(self, spares: Set[int] = frozenset()) -> dict[int, Numbers]:
        """By stage. A spare has dropped its sums, and nobody took them over if they would have spared nothing."""
        found: dict[int, set[int]] = defaultdict(set)
        for (thread, stage), numbers in self._done.items():
            if thread not in self._lost | spares:
                found[stage] |= numbers
        return {stage: frozenset(numbers) for stage, numbers in found.items()}
