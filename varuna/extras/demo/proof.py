"""Checks of the demo's run: morphs happened, nothing was lost, losses agree. Pure."""

from collections.abc import Sequence
from itertools import pairwise

from rich.table import Table

from varuna.core.value import Value
from varuna.observe.report import GenerationRow, largest_relative_difference

TOLERANCE = 1e-5
"""Largest relative difference of a loss that fp32 sums in another order can explain, with room."""


class DemoReport(Value):
    """The content of ``report.json``."""

    generations: tuple[GenerationRow, ...]
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    max_relative_difference: float

    @classmethod
    def of(cls, generations: Sequence[GenerationRow], losses: list[float], reference: list[float]) -> "DemoReport":
        """Compare both curves.

        Raises:
            ValueError: the curves differ in length.
        """
        return cls(
            generations=tuple(generations),
            losses=tuple(losses),
            reference_losses=tuple(reference),
            max_relative_difference=largest_relative_difference(losses, reference),
        )

    def failures(self, morphs: int) -> list[str]:
        """One sentence for each check that failed; ``morphs`` is how many were provoked."""
        plans = [row.plan for row in self.generations]
        found = []
        if len(plans) - 1 != morphs:
            found.append(f"{morphs} morphs were provoked, but {len(plans) - 1} happened")
        if not any(a.stages != b.stages for a, b in pairwise(plans)):
            found.append("no morph changed the number of stages")
        if not any(a.replicas != b.replicas for a, b in pairwise(plans)):
            found.append("no morph changed the number of replicas")
        for row in self.generations[1:]:
            if row.first_step == 0:
                found.append(f"generation {row.generation} started again at step 0")
            if row.recovery_seconds is None:
                found.append(f"generation {row.generation} finished no step")
        if not self.max_relative_difference <= TOLERANCE:
            found.append(f"losses differ by {self.max_relative_difference:.1e}, more than {TOLERANCE:.0e}")
        return found


def loss_table(losses: Sequence[float], reference: Sequence[float]) -> Table:
    """Both curves side by side at about ten steps, the last one included."""
    table = Table(title="Losses", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("step", "Varuna", "plain PyTorch", "relative difference"):
        table.add_column(name, justify="right", no_wrap=True)
    last = len(losses) - 1
    for step in sorted({round(last * row / 9) for row in range(10)}):
        ours, theirs = losses[step], reference[step]
        table.add_row(str(step), f"{ours:.7f}", f"{theirs:.7f}", f"{abs(ours - theirs) / abs(theirs):.1e}")
    return table
