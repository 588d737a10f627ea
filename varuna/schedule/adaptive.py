"""Varuna's own policy: what pipelines on slow links gain beyond the paper's rules (§"Tuning pipeline efficiency")."""

from varuna.schedule.actions import Action, Kind

# Enum members are looked up slowly, and a simulated step asks a hundred thousand times.
_FORWARD, _RECOMPUTE, _BACKWARD = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
_INPUT, _WEIGHT = Kind.INPUT, Kind.WEIGHT


class AdaptivePolicy:
    """Goes past the paper: whatever is ready runs, in the order in which others wait for it.

    First the backward whose gradient is here, with its R in front of it; then a forward; and only an idle stage
    recomputes ahead of the gradient. But while too few micro-batches are in flight to keep later stages busy, a
    forward comes before an R, and on a stage that keeps everything before a backward: otherwise uneven stages lose up
    to 8 %, and keeping more could make a step longer. Against the paper's rules (figures in docs/schedules.md):

    - Rule 2 is relaxed: a forward that builds no graph may run while a micro-batch has its activations.
    - A micro-batch that is next to go backward when its F runs keeps its activations: one set, the same memory.
    - The last ``split_last`` backwards run as I, whose result leaves at once, and W. Stage 0, which sends no
      gradient, runs them whole. W follows its I, unless the stage keeps everything: then W's wait for idle time.
    - With ``empties``, the stage before the last begins no forward while a backward's gradient is here. So it is empty
      again and again, and the next micro-batch needs no R. It pays where the last stage, which has no R's, has time.
    - No hint of the gradient's coming (the paper's rule 1): with the above it gains at most 1 % on fast links, loses
      2 % on the slowest, and would cost a message for each micro-batch.

    It stays live under any stash limits of at least 1: the lowest micro-batch that is not through finds every stage
    that it has not entered empty, and where it waits for its gradient nothing but forwards that are ready may run
    before its R, of which there are at most as many as the limit.

    Micro-batches count from 0 within the replica. F's and backwards both go in that order, so three counters say all:
    ``ended`` <= ``begun`` <= ``forwards`` <= N, each the index of the next micro-batch for W, for B or I, and for F.
    """

    def __init__(
        self,
        stage: int,
        *,
        stages: int,
        micro_batches: int,
        stash_limit: int,
        split_last: int = 0,
        empties: bool = False,
        keeps_all: bool = False,
    ) -> None:
        self.stage = stage
        self.backward_order = tuple(range(micro_batches))
        self._micro_batches = micro_batches
        self._limit = stash_limit
        # Only the last ones: while the pipeline is full, the stage before has other work (docs/schedules.md).
        self._first_split = max(0, micro_batches - split_last) if stage else micro_batches
        self._few = _few_in_flight(stages - stage, empties=empties, keeps_all=keeps_all)
        self._keeps_all = keeps_all
        self._forwards = 0
        self._begun = 0  # backwards: B's and I's
        self._ended = 0  # backwards: B's and W's
        self._has_graph = keeps_all  # the next backward has its activations; or they are those of the pending W

    @property
    def finished(self) -> bool:
        """Whether every backward is done."""
        return self._ended == self._micro_batches

    def next(self, activations_in: int, gradients_in: int) -> Action | None:
        """Return the ready action that other stages wait for most; None: wait for an arrival."""
        kind = self.choose(activations_in, gradients_in)
        if kind is None:
            return None
        micro_batch = self._forwards if kind is _FORWARD else self._ended if kind is _WEIGHT else self._begun
        return Action(self.stage, kind, micro_batch)

    def choose(self, activations_in: int, gradients_in: int) -> Kind | None:
        """Return the kind of the next action, or None to wait."""
        forwards, begun, ended = self._forwards, self._begun, self._ended
        # Until this W has run, the stage's one set of activations is taken, and no R could run.
        if ended < begun and not self._keeps_all:
            return _WEIGHT
        # Until W, not until I: an input and its activations stay until the weights have their gradients.
        in_flight = forwards - ended
        can_run_forward = forwards < activations_in and in_flight < self._limit
        # Gradients arrive in the order of the F's, so their number tells whether that of ``begun`` is here.
        if begun < forwards and begun < gradients_in:
            # Too few are in flight to keep later stages at work: then an F goes first.
            can_wait = can_run_forward and in_flight < self._few
            # A recomputed graph is the stage's one set: its backward frees it, so it goes first whatever is in flight.
            if self._has_graph and not (can_wait and self._keeps_all):
                return _BACKWARD if begun < self._first_split else _INPUT
            if not can_wait:
                return _RECOMPUTE
        if can_run_forward:
            return _FORWARD
        # Reached only by a stage that keeps everything: each of its W's has a graph of its own, which blocks no other.
        if ended < begun:
            return _WEIGHT
        # The gradient is not here, and nothing else is ready: R ahead of it, as the paper's rule 1 wants.
        if begun < forwards and not self._has_graph:
            return _RECOMPUTE
        return None

    def done(self, action: Action) -> None:
        """Record that ``action`` has run."""
        self.count(action.kind)

    def count(self, kind: Kind) -> None:
        """Count an action of this kind."""
        if kind is _FORWARD:
            # As in ``keeps``, which is asked before this F is counted: on an empty stage it keeps its graph.
            if self._forwards == self._ended:
                self._has_graph = True
            self._forwards += 1
        elif kind is _RECOMPUTE:
            self._has_graph = True
        else:
            if kind is not _WEIGHT:
                self._begun += 1
            if kind is not _INPUT:
                self._ended += 1
                self._has_graph = self._keeps_all

    def keeps(self, micro_batch: int) -> bool:
        """Return whether F keeps its graph: all of the stage is kept, or this micro-batch is alone on it."""
        return self._keeps_all or self._forwards == self._ended

    def awaited(self) -> Action:
        """Return the next forward if there is room for its input, else the next backward, which lacks its gradient."""
        if self._forwards < self._micro_batches and self._forwards - self._ended < self._limit:
            return Action(self.stage, Kind.FORWARD, self._forwards)
        return Action(self.stage, Kind.BACKWARD, self._begun)


def _few_in_flight(stages_left: int, *, empties: bool, keeps_all: bool) -> float:
    """Return the number of micro-batches below which the stages that are left, this one included, may run dry.

    Forwards that put off no more than an R cost little, and more of them pay. The last stage feeds none, and the one
    before it may run dry if that saves R's.
    """
    if not keeps_all:
        if empties and stages_left == 2:
            return 0.0
        return 1.5 * stages_left + 1
    return stages_left + 1 if stages_left > 1 else 0.0
