"""The vector that all ranks sum at the end of a step: the commit vote.

    slots of    written by                                  what, in float64
    S           replica 0, where the section s is           squared norm of the section's gradients
    N x w       last stage of the replica that ran j (*)    weighted loss, weight, each metric's sum of micro-batch j
    2 S         every replica, where the section s is       micro-batches in the sums of s, and the sum of (j + 1)^2
    flags       see ``VoteLayout.flag``                     stop, checkpoint, lr, ...

S sections s and N micro-batches j of the step over all replicas, both from 0; w = 2 + metrics. So the layout depends on
m and the model, and neither on P nor on D. (*) Where j does not run again after a loss (core.sums), replica 0's.

Each slot has one writer and is zero elsewhere, so the sum is exact and does not depend on P or D. Counts have a writer
for each replica, and are exact too: they are whole numbers.
Totals over slots use ``math.fsum``: correctly rounded, whatever the order.
"""

import math
from collections.abc import Sequence

from pydantic import Field

from varuna.core.sums import square_sum
from varuna.core.value import Value

FLAGS = (
    "stop",
    "regroup",
    "checkpoint",
    "compare",
    "keep",
    "kept",
    "lr",
    "measured",
    "written",
    "written_by",
    "publishing",
)


class VoteLayout(Value):
    """The slots of the vector: sections, then micro-batches, what is in the sums of sections, then flags."""

    sections: int = Field(ge=1)
    micro_batches: int = Field(ge=1)
    metrics: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Length of the vector (float64)."""
        return 3 * self.sections + self.micro_batches * (2 + len(self.metrics)) + len(FLAGS)

    def squared_norm(self, section: int) -> int:
        """Slot of a section's squared gradient norm (of the weighted sum, before the division)."""
        return section

    def micro_batch(self, index: int) -> int:
        """First slot of global micro-batch ``index``: weighted loss, weight, then each metric's sum."""
        return self.sections + index * (2 + len(self.metrics))

    def added(self, section: int) -> int:
        """First of two slots: how many micro-batches are in a section's sums, and the sum of their (j + 1)^2.

        Each replica adds its own: whole numbers, so that the sum is exact whatever the order.
        """
        return self.sections + self.micro_batches * (2 + len(self.metrics)) + 2 * section

    def unproven(self, vector: Sequence[float]) -> tuple[int, ...]:
        """Find the sections whose sums do not contain every micro-batch exactly once, by the summed vector.

        Any single micro-batch that is missing or twice shows.
        """
        # Two sums: one lost and another one counted twice leave the count as it is, but not the sum of squares.
        right = float(self.micro_batches), float(square_sum(((0, self.micro_batches),)))
        at = {section: self.added(section) for section in range(self.sections)}
        return tuple(section for section, first in at.items() if tuple(vector[first : first + 2]) != right)

    def flag(self, name: str) -> int:
        """Slot of a flag: positive raises it (``stop``, ``checkpoint``: any rank; the others, and ``lr``: one rank).

        ``kept`` counts ranks of whose newest memory checkpoint there is a copy. ``keep``: after this step another is
        made, if there are copies of all ranks' (1), or whatever became of the newest (2).
        ``publishing`` counts ranks that still write what was published last.
        ``measured`` and ``written`` are sums of numbers that are the same on all ranks, and ``written_by`` is that of
        ``written`` times rank + 1, which tells one rank that differs.
        """
        return self.size - len(FLAGS) + FLAGS.index(name)

    def read(self, vector: Sequence[float]) -> "StepTotals":
        """Read the summed vector.

        Raises:
            ValueError: the vector has another length.
        """
        if len(vector) != self.size:
            raise ValueError(f"expected a vote of {self.size} numbers, got {len(vector)}")
        first, width = self.sections, 2 + len(self.metrics)
        last = first + self.micro_batches * width
        # A slice by width takes the same number of each micro-batch: +0 the loss, +1 the weight, +2 on the metrics.
        weight = _total(vector[first + 1 : last : width])
        return StepTotals(
            loss=_total(vector[first:last:width]) / weight if weight else 0.0,
            weight=weight,
            # Norms are of the weighted sum of gradients, so the mean's norm is one division away.
            grad_norm=math.sqrt(_total(vector[:first])) / weight if weight else 0.0,
            metrics={name: _total(vector[first + 2 + i : last : width]) for i, name in enumerate(self.metrics)},
            stop=vector[self.flag("stop")] > 0,
            regroup=vector[self.flag("regroup")] > 0,
            checkpoint=vector[self.flag("checkpoint")] > 0,
            compare=vector[self.flag("compare")] > 0,
            keep=int(vector[self.flag("keep")]),
            kept=int(vector[self.flag("kept")]),
            publishing=int(vector[self.flag("publishing")]),
            lr=vector[self.flag("lr")],
        )

    def tally(self, vector: Sequence[float]) -> "Tally":
        """Return what is recorded about the step of this vote.

        Raises:
            ValueError: the vector has another length.
        """
        totals = self.read(vector)
        return Tally(loss=totals.loss, weight=totals.weight, counted=self.counted(vector))

    def counted(self, vector: Sequence[float]) -> int:
        """Number of micro-batches whose weight a rank has written."""
        first, width = self.sections, 2 + len(self.metrics)
        return sum(weight != 0 for weight in vector[first + 1 : first + self.micro_batches * width : width])


class Tally(Value):
    """The record of a committed step."""

    loss: float
    weight: float
    counted: int = Field(description="micro-batches whose weight a rank has written")


class StepTotals(Value):
    """The totals of a step, computed from its vote."""

    loss: float = Field(description="of the global batch: weighted sum over weight")
    weight: float = Field(description="target tokens, or examples, of the global batch")
    grad_norm: float = Field(description="global L2 norm before clipping")
    metrics: dict[str, float]
    stop: bool
    regroup: bool
    checkpoint: bool
    compare: bool = False
    keep: int = 0
    kept: int = 0
    publishing: int = 0
    lr: float


def _total(values: Sequence[float]) -> float:
    """Return the exact sum; NaN if a term is NaN or infinities of both signs meet."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        # What fsum refuses is infinite or NaN in a plain sum, so that the step shows as not finite.
        return sum(values)
