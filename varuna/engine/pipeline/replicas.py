"""The comparison of the states that the replicas of a stage hold, at a thousandth of the time.

All replicas get the same gradients and make the same update, so nothing else compares them. What one of them drew by
itself, or what memory has changed, would stay unseen: each would train a model of its own on its share of the samples.
"""

import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import bit_sum
from varuna.core.errors import WorkerError
from varuna.engine.device.capacity import rounding_kind
from varuna.engine.pipeline.reduce import Reducer
from varuna.engine.stage.stage import Stage

_SHARE = 1e-3
"""Of the time that goes into comparisons."""
_ROUNDING = 1e-3
"""Sums of replicas on unlike devices may differ by this much of the sum of absolute values."""
_NAMED = 3


class ReplicaComparison:
    """Compares the states of all replicas of a generation, as each rank holds its stage."""

    def __init__(self, stage: Stage, reducer: Reducer, rank: int) -> None:
        self._stage, self._reducer, self._plan, self._rank = stage, reducer, stage.plan, rank
        self._replica = stage.plan.place_of(rank).replica
        self._next_s = 0.0  # by this rank's clock

    @property
    def is_due(self) -> bool:
        """Whether it is time for another one: one rank asks, and says it in the vote."""
        return self._plan.replicas > 1 and time.monotonic() >= self._next_s

    def run(self, step: int) -> None:
        """Compare the states after ``step``; every rank takes part.

        Raises:
            WorkerError: two replicas differ; every rank raises it.
        """
        begin_s = time.monotonic()
        model = self._stage.job.model
        kind = rounding_kind(self._stage.job.device)
        states = {section: _replicated(self._stage, section) for section in self._stage.sections}
        table = torch.zeros(self._plan.replicas, len(model.sections), 2, dtype=torch.int64)
        for section, state in states.items():
            # Below 2^62, since the sum over ranks of a row with one writer must fit into int64.
            table[self._replica, section, 0] = sum(bit_sum(value) for value in state.values()) % 2**62
            table[self._replica, section, 1] = kind
        self._reducer.sum_over_grid(("compared", step), table, f"the other replicas' checksums (step {step})")
        odd = [section for section in range(len(model.sections)) if not (table[:, section] == table[0, section]).all()]
        if odd:
            is_alike = bool((table[:, odd[0], 1] == table[0, odd[0], 1]).all())
            self._name(step, odd[0], states.get(odd[0], {}), is_alike=is_alike)
        now_s = time.monotonic()
        # What it took decides when the next is due: the share of time holds for any size of state.
        self._next_s = now_s + (now_s - begin_s) / _SHARE

    def _name(self, step: int, section: int, state: Mapping[str, Tensor], *, is_alike: bool) -> None:
        """Find out what differs, and whether that is more than rounding.

        Raises:
            WorkerError: it is.
        """
        names = list(self._names(section))
        bits = torch.zeros(self._plan.replicas, len(names), dtype=torch.int64)
        sizes = torch.zeros(self._plan.replicas, len(names), 2, dtype=torch.float64)
        for number, name in enumerate(names):
            its = [value for path, value in state.items() if path.split("/")[1] == name]
            bits[self._replica, number] = sum(map(bit_sum, its)) % 2**62
            sizes[self._replica, number] = sum((_sizes(each) for each in its), torch.zeros(2, dtype=torch.float64))
        for key, values in (("bits", bits), ("sizes", sizes)):
            what = f"the other replicas' checksums of section {section} (step {step})"
            self._reducer.sum_over_grid(("compared", key, step), values, what)
        odd = (bits != bits[0]).any(0)
        # Unlike devices round differently in the update, so equal bits cannot be expected of them.
        if not is_alike:
            apart = (sizes[..., 0] - sizes[0, :, 0]).abs().amax(0)
            odd &= ~(apart <= _ROUNDING * sizes[..., 1].amax(0))  # NaN is odd
        found = [name for name, is_odd in zip(names, odd.tolist(), strict=True) if is_odd]
        if found:
            more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            raise WorkerError(
                f"after step {step} the replicas of section {section} hold different values of "
                f"{', '.join(found[:_NAMED])}{more}. All of them made the same update from the same gradients, unless "
                "before_step=, the optimizer or a hook read something that is not the same on all workers: the clock, "
                "files, a generator of its own (draw from torch's default generator, which Varuna seeds), or values "
                "that the loop changes on some workers only. If it does nothing of that, a machine's memory may be "
                "faulty. Newer checkpoints may have either's values."
            )

    def _names(self, section: int) -> Iterator[str]:
        graph = self._stage.job.model.sections[section]
        yield from dict.fromkeys((*graph.parameters, *graph.updated))


def _replicated(stage: Stage, section: int) -> dict[str, Tensor]:
    """Return what all replicas hold of a section: its state; of a sharded one, the parameters that it computes with."""
    exchanged = stage.exchanged_parameters()
    if section not in exchanged:
        return stage.state_of(section).tensors
    model = stage.job.model
    names = [name for name in dict.fromkeys(model.sections[section].parameters) if name in model.trainable]
    return {f"parameters/{name}": value for name, value in zip(names, exchanged[section], strict=True)}


def _sizes(value: Tensor) -> Tensor:
    """Return the sum of a tensor, and that of its absolute values, in float64."""
    wide = value.detach().to("cpu", torch.complex128 if value.is_complex() else torch.float64)
    wide = torch.view_as_real(wide) if wide.is_complex() else wide
    return torch.stack([wide.sum(), wide.abs().sum()])
