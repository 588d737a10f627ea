"""The numbers that a run computes with, and the loss scale that half precision needs (paper §"Evaluation": fp16)."""

from typing import Literal, NamedTuple, get_args

Precision = Literal["fp32", "bf16", "fp16"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Reduction = Literal["fp32", "bf16"]
"""The type in which gradients cross between replicas; they are summed in fp32 in either case."""

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

_GROWTH_STEPS = 2000
_LARGEST = 2.0**24
_SMALLEST = 2.0**-14


class LossScale(NamedTuple):
    """The factor that keeps fp16 gradients above underflow: always a power of two, so that it costs no bit.

    It halves when a step overflows, which is then skipped, and doubles after 2,000 steps without one, as in torch's
    ``GradScaler``. A function of the votes alone, so that all ranks agree and a morph or a resume changes nothing.
    """

    value: float = 2.0**16
    good_steps: int = 0

    def after(self, overflowed: bool) -> "LossScale":
        """Return the scale for the next step, given whether this one overflowed."""
        if overflowed:
            return LossScale(max(self.value / 2, _SMALLEST), 0)
        if self.good_steps + 1 < _GROWTH_STEPS:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(self.value * 2, _LARGEST), 0)
