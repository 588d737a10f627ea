"""Choice of the samples of a step: a pure function of what has been appended, and of what the steps before it used.

A sample has the version of the model that made it: the number of steps after which that was published. Step s uses
samples of the versions from s - staleness to s, the oldest first. So what a step may use was used, if at all, by one
of the last ``staleness`` steps, and nothing else need be known of the past.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pydantic import Field

from varuna.core.value import Value

Row = tuple[str, int]
"""A sample: the name of an object, and its place in that."""


class Appended(NamedTuple):
    """An object with samples, as its name tells; in the order of use."""

    version: int
    name: str
    rows: int


class StepOrder(Value):
    """The samples of one step, in order: decided once, for all workers, resumes and replays."""

    samples: tuple[Row, ...]
    skipped: int = Field(description="samples that became too old for this step, and that no step has used")


class Usable(NamedTuple):
    """Samples that a step can choose from, and how many became too old."""

    rows: tuple[Row, ...]
    skipped: int


def versions(step: int, staleness: int) -> range:
    """Versions whose samples a step may use."""
    return range(max(0, step - staleness), step + 1)


def usable(step: int, staleness: int, appended: Iterable[Appended], used: Collection[Row]) -> Usable:
    """Return the samples that are left for a step.

    Args:
        step: that is to be decided on.
        staleness: bound on the steps between a sample's version and the step that uses it.
        appended: all objects of ``versions(step, staleness)``, and of the version before those.
        used: by the steps before it, from ``step - staleness - 1`` on.
    """
    fresh, rows, skipped = versions(step, staleness), list[Row](), 0
    for each in sorted(appended):
        left = [row for row in ((each.name, place) for place in range(each.rows)) if row not in used]
        if each.version in fresh:
            rows += left
        elif each.version == fresh.start - 1:
            skipped += len(left)
    return Usable(tuple(rows), skipped)
