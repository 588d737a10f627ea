"""How long a rank's steps took: sent with heartbeats, merged by the manager, kept with the run."""

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from varuna.core.value import Value


class Typical(NamedTuple):
    """How many seconds something takes, and how often it was seen."""

    seen: int
    seconds: float


class Carried(NamedTuple):
    """How many seconds a transfer takes, how many bytes it has, and how often it was seen."""

    seen: int
    size_bytes: float
    seconds: float


class RankTimes(Value):
    """Whole steps of one rank in one generation; medians over a heartbeat, means of those over a run."""

    steps: int = Field(ge=1)
    step_s: float = Field(description="of a step, without the user's code between two")
    waited_s: float = Field(description="of it, for activations, gradients and samples")
    reduced_s: float = Field(description="of it, after the last action, for all-reduces and tied gradients")
    actions: dict[str, Typical] = Field(description="F, R, B, I, W on the training thread")
    messages: Carried | None = Field(default=None, description="until the transport was through with one")
    reductions: Carried | None = Field(default=None, description="all-reduce of one section; waits for peers included")

    @property
    def compute_s(self) -> float:
        """Actions of a step."""
        return sum(seen * seconds for seen, seconds in self.actions.values()) / self.steps

    @property
    def ending_s(self) -> float:
        """Vote, optimizer and bookkeeping of a step: all that is not an action, a wait or a reduction."""
        return max(0.0, self.step_s - self.compute_s - self.waited_s - self.reduced_s)


def merged(times: Iterable[RankTimes]) -> RankTimes:
    """Merge several reports into one, each weighted by how often it has seen each action.

    Raises:
        ValueError: there is none.
    """
    found = list(times)
    if not found:
        raise ValueError("there are no times to merge")
    steps = sum(each.steps for each in found)

    def mean(values: Iterable[float]) -> float:
        return sum(value * each.steps for value, each in zip(values, found, strict=True)) / steps

    kinds = dict.fromkeys(kind for each in found for kind in each.actions)
    return RankTimes(
        steps=steps,
        step_s=mean(each.step_s for each in found),
        waited_s=mean(each.waited_s for each in found),
        reduced_s=mean(each.reduced_s for each in found),
        actions={kind: _typical([each.actions[kind] for each in found if kind in each.actions]) for kind in kinds},
        messages=_carried([each.messages for each in found if each.messages is not None]),
        reductions=_carried([each.reductions for each in found if each.reductions is not None]),
    )


def _typical(values: list[Typical]) -> Typical:
    count = sum(each.seen for each in values)
    return Typical(count, sum(each.seen * each.seconds for each in values) / count)


def _carried(values: list[Carried]) -> Carried | None:
    count = sum(each.seen for each in values)
    if not count:
        return None
    size_bytes = sum(each.seen * each.size_bytes for each in values) / count
    return Carried(count, size_bytes, sum(each.seen * each.seconds for each in values) / count)
