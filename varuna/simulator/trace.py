"""The trace of a simulated step: times, shares, memory. Everything beyond the rows is derived when asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from varuna.schedule.actions import Action, Kind, Orders
from varuna.schedule.usage import Usage, usage
from varuna.simulator.costs import PipelineCosts

_FORWARD, _WEIGHT = Kind.FORWARD, Kind.WEIGHT  # enum members are looked up slowly
_MAKES_GRADIENT = (Kind.BACKWARD, Kind.INPUT)
_ENDS_BACKWARD = (Kind.BACKWARD, Kind.WEIGHT)


class Executed(NamedTuple):
    """An action and when it ran, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


class Row:
    """The actions that one stage ran, in order, with start and end times in seconds.

    Columns of plain values: a hundred thousand small tuples would keep the garbage collector busy for longer than
    the simulation takes.
    """

    __slots__ = ("backward_order", "ends_s", "kinds", "stage", "starts_s")

    def __init__(
        self,
        stage: int,
        backward_order: Sequence[int],
        kinds: Sequence[Kind],
        starts_s: Sequence[float],
        ends_s: Sequence[float],
    ) -> None:
        self.stage = stage
        self.backward_order = backward_order
        self.kinds = kinds
        self.starts_s = starts_s
        self.ends_s = ends_s

    @property
    def micro_batches(self) -> Iterator[int]:
        """Micro-batch of each action: forwards run in order, and an R is that of the next backward."""
        forwards = begun = ended = 0
        for kind in self.kinds:
            if kind is Kind.FORWARD:
                yield forwards
                forwards += 1
            else:
                yield self.backward_order[ended if kind is Kind.WEIGHT else begun]
                begun += kind in _MAKES_GRADIENT
                ended += kind in _ENDS_BACKWARD

    def made_s(self, kinds: Sequence[Kind]) -> list[float]:
        """End times of its actions of these kinds; all stages run forwards in one order, and backwards in one."""
        return [end_s for kind, end_s in zip(self.kinds, self.ends_s, strict=True) if kind in kinds]

    def __iter__(self) -> Iterator[Executed]:
        columns = zip(self.kinds, self.micro_batches, self.starts_s, self.ends_s, strict=True)
        for kind, micro_batch, start_s, end_s in columns:
            yield Executed(Action(self.stage, kind, micro_batch), start_s, end_s)


class StageTimes(NamedTuple):
    """Seconds of a stage's step, by their use; the parts add up to it."""

    compute_s: float
    transfer_s: float
    """idle, while what it ran next was on its way"""
    idle_s: float
    """idle for any other reason: what it ran next was not made yet, or the step's end was not here"""
    reduce_s: float
    """its all-reduce, and the exchange of its tied parameters"""
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The record of a simulated step."""

    step_s: float
    """Start to end of the optimizer step."""
    reduced_s: tuple[float, ...]
    """Times at which each stage's gradients were summed: over the replicas, and over holders of tied parameters."""
    costs: PipelineCosts
    rows: tuple[Row, ...]
    """Executed actions, by stage."""

    @property
    def ends_s(self) -> tuple[float, ...]:
        """End of the last action, by stage."""
        return tuple(row.ends_s[-1] for row in self.rows)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the stages, in [0, 1], from the start to the last backward of the pipeline."""
        span = len(self.rows) * max(self.ends_s)
        busy = sum(sum(row.ends_s) - sum(row.starts_s) for row in self.rows)
        return max(0.0, 1.0 - busy / span) if span else 0.0

    @property
    def exposed_reduce_s(self) -> float:
        """Seconds from the pipeline's last backward to the last sum: the part of all-reduces that nothing hides."""
        return max(self.reduced_s) - max(self.ends_s)

    @property
    def orders(self) -> Orders:
        """The executed actions without their times: what the validator checks."""
        return tuple(tuple(action for action, _, _ in row) for row in self.rows)

    @property
    def usage(self) -> tuple[Usage, ...]:
        """Peaks of stash and live activation sets, by stage."""
        return tuple(usage(row) for row in self.orders)

    @property
    def stage_bytes(self) -> tuple[int, ...]:
        """Upper bound on bytes in flight, by stage: the peaks of stash and live sets, as if they coincided."""
        return tuple(
            use.stash * stage.stash_bytes + use.live * stage.live_bytes
            for use, stage in zip(self.usage, self.costs.stages, strict=True)
        )

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        """Seconds that each stage spent computing, waiting, idling and reducing."""
        return tuple(self._times(k) for k in range(len(self.rows)))

    def _times(self, stage: int) -> StageTimes:
        row, last = self.rows[stage], len(self.rows) - 1
        activations_s = self.rows[stage - 1].made_s((Kind.FORWARD,)) if stage else ()
        gradients_s = self.rows[stage + 1].made_s(_MAKES_GRADIENT) if stage < last else ()
        compute_s = transfer_s = before_s = 0.0
        forwards = backwards = 0
        for kind, start_s, end_s in zip(row.kinds, row.starts_s, row.ends_s, strict=True):
            if start_s > before_s and kind is not _WEIGHT:
                arrived, number = (activations_s, forwards) if kind is _FORWARD else (gradients_s, backwards)
                made_s = arrived[number] if arrived else start_s
                transfer_s += max(0.0, start_s - max(before_s, made_s))
            if kind is _FORWARD:
                forwards += 1
            elif kind in _MAKES_GRADIENT:
                backwards += 1
            compute_s += end_s - start_s
            before_s = end_s
        optimizer_s = self.costs.optimizer_s
        exchanges_s = sum(tied.exchange_s for tied in self.costs.tied if stage in tied.stages)
        reduce_s = self.costs.stages[stage].allreduce_s + exchanges_s
        idle_s = max(0.0, self.step_s - compute_s - transfer_s - reduce_s - optimizer_s)
        return StageTimes(compute_s, transfer_s, idle_s, reduce_s, optimizer_s)
