"""Steps of different numbers of samples, as when a batch grows during warm-up.

A run has ``most`` positions for each step, in any step, so plans and micro-batches stay. Step s uses the first n(s) of
its own; the others have no sample, and the order of samples passes over them::

    position   0 1 2 3 | 4 5 6 7 | 8 9 ...      most = 4
    n(s)       2       | 3       | 4
    sample     0 1 - - | 2 3 4 - | 5 6 ...      places in the order of samples
"""

import operator
import threading
from collections.abc import Callable
from fractions import Fraction

from varuna.core.errors import UsageError

RampFunction = Callable[[int], int]
"""``fn(step)``: samples of a step"""


class Ramp:
    """The numbers of samples of all steps, as a function of the user's says."""

    def __init__(self, function: RampFunction, most: int) -> None:
        self._function, self.most = function, most
        self._firsts, self._lock = [0], threading.Lock()
        """samples of all steps before, by step"""

    def size(self, step: int) -> int:
        """Return the samples of a step.

        Raises:
            UsageError: it is no whole number from 1 to ``most``.
        """
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        """Return the samples of all steps before one.

        Raises:
            UsageError: as ``size``.
        """
        with self._lock:
            while len(self._firsts) <= step:
                self._firsts.append(self._firsts[-1] + self._asked(len(self._firsts) - 1))
            return self._firsts[step]

    def place(self, position: int) -> int | None:
        """Return the place in the order of samples; None: the position has no sample."""
        step, place = divmod(position, self.most)
        return self.before(step) + place if place < self.size(step) else None

    def steps_for(self, samples: Fraction) -> int:
        """Return the fewest steps that have ``samples`` samples together."""
        step = 0
        while self.before(step) < samples:
            step += 1
        return step

    def _asked(self, step: int) -> int:
        found = self._function(step)
        try:
            size = operator.index(found)
        except TypeError:
            size = 0
        if not 1 <= size <= self.most:
            raise UsageError(
                f"batch_ramp= returned {found!r} for step {step}. It must be the number of examples of that step, a "
                f"whole number from 1 to global_batch={self.most}."
            )
        return size
