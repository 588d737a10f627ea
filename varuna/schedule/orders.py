"""Static orders: the sequence in which each of P stages runs the actions of N micro-batches.

Stages k count from 0 in [0, P), micro-batches i from 0 in [0, N); row k is stage k's.

The rule for all of them: an F that is directly followed by its own B keeps its activations; every other
micro-batch has an R of its own between its F and its B. No order ever needs two sets of activations.
"""

from collections.abc import Iterable, Iterator

from varuna.schedule.actions import Action, Kind, Orders, Row


def gpipe(stages: int, micro_batches: int) -> Orders:
    """Make the order of GPipe (Huang et al. 2019): all forwards, then all backwards, last one first."""
    forwards = [(Kind.FORWARD, i) for i in range(micro_batches)]
    backwards = [(Kind.BACKWARD, i) for i in reversed(range(micro_batches))]
    return tuple(_row(stage, [*forwards, *backwards]) for stage in range(stages))


def one_f_one_b(stages: int, micro_batches: int) -> Orders:
    """Make 1F1B (PipeDream-flush, Megatron): stage k fills up with P - k forwards, then alternates."""
    return tuple(
        _row(stage, _alternating(min(stages - stage, micro_batches), micro_batches)) for stage in range(stages)
    )


def varuna(stages: int, micro_batches: int) -> Orders:
    """Make the paper's rule-based order (§"Tuning pipeline efficiency") for uniform stages, F = R = 1 and B = 2.

    Time runs in quanta of one F. Each stage serves what it has in the order of the rules: finish a B, begin
    the B of a finished R (rule 2), R, F (rule 3). A stage that begins a B announces it upstream, so that the
    R there runs beside the second half of this B and is done when the gradient comes (rule 1).
    """
    pipeline = [_QuantumStage(stage, stages, micro_batches) for stage in range(stages)]
    left = stages * micro_batches
    while left:
        kinds = [stage.serve() for stage in pipeline]
        # What a quantum brings about shows in the next one.
        for k, kind in enumerate(kinds):
            if kind is Kind.FORWARD and k + 1 < stages:
                pipeline[k + 1].activations_in += 1
            elif kind is Kind.BACKWARD:
                left -= 1
                if k:
                    pipeline[k - 1].announced += 1
    return tuple(tuple(stage.row) for stage in pipeline)


class _QuantumStage:
    """A stage between two quanta; all micro-batches go in order, so that counters say everything."""

    __slots__ = (
        "activations_in",
        "announced",
        "finishing",
        "forwards",
        "is_last",
        "live",
        "recomputes",
        "row",
        "stage",
    )

    def __init__(self, stage: int, stages: int, micro_batches: int) -> None:
        self.stage = stage
        self.is_last = stage == stages - 1
        self.activations_in = 0 if stage else micro_batches
        self.announced = 0  # B's that the next stage has begun
        self.forwards = 0
        self.recomputes = 0
        self.live = False  # activations are there, B is next
        self.finishing = False  # second half of a B
        self.row: list[Action] = []

    def serve(self) -> Kind | None:
        """Run one quantum; return the kind of the action that began in it, if any did."""
        if self.finishing:
            self.finishing = False
            return None
        if self.live:
            self.live, self.finishing = False, True
            # The activations are the newest R's; the newest F's on the last stage, which never recomputes (paper).
            return self._begin(Kind.BACKWARD, (self.forwards if self.is_last else self.recomputes) - 1)
        # Before any F (rule 3). The next stage has begun this B: its second half takes as long as R here (rule 1).
        if self.recomputes < self.announced:
            self.live = True
            self.recomputes += 1
            return self._begin(Kind.RECOMPUTE, self.recomputes - 1)
        if self.forwards < self.activations_in:
            self.live = self.is_last
            # One set of activations at a time: on other stages this F keeps its input only.
            self.forwards += 1
            return self._begin(Kind.FORWARD, self.forwards - 1)
        return None

    def _begin(self, kind: Kind, micro_batch: int) -> Kind:
        self.row.append(Action(self.stage, kind, micro_batch))
        return kind


def _alternating(depth: int, micro_batches: int) -> Iterator[tuple[Kind, int]]:
    """Yield ``depth`` forwards, then B and F in turn, then the remaining B's."""
    yield from ((Kind.FORWARD, i) for i in range(depth))
    for i in range(micro_batches):
        yield Kind.BACKWARD, i
        if i + depth < micro_batches:
            yield Kind.FORWARD, i + depth


def _row(stage: int, work: Iterable[tuple[Kind, int]]) -> Row:
    """Make a stage's row: its F's and B's with the R's that they need."""
    row: list[Action] = []
    for kind, micro_batch in work:
        # Directly after its own F, a B finds the activations still there.
        if kind is Kind.BACKWARD and row[-1] != (stage, Kind.FORWARD, micro_batch):
            row.append(Action(stage, Kind.RECOMPUTE, micro_batch))
        row.append(Action(stage, kind, micro_batch))
    return tuple(row)
