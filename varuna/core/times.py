"""How long a rank's steps took: sent with heartbeats, merged by the manager, kept with the run.

And of a single step, if somebody asks, what every rank did and when, as workers tell it and as files of a run keep it.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from varuna.core.plan import Plan
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


class Compressed(NamedTuple):
    """Bytes of messages that crossed compressed, and bytes that were sent of them."""

    size_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Of the two; 1 where there were none."""
        return self.size_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def plus(self, other: "Compressed", sign: int = 1) -> "Compressed":
        """Both together, or the one without the other."""
        return Compressed(self.size_bytes + sign * other.size_bytes, self.sent_bytes + sign * other.sent_bytes)


class RankTimes(Value):
    """Whole steps of one rank in one generation; medians over a heartbeat, means of those over a run."""

    steps: int = Field(ge=1)
    step_s: float = Field(description="of a step, without the user's code between two")
    waited_s: float = Field(description="of it, for activations, gradients and samples")
    reduced_s: float = Field(description="of it, after the last action, for all-reduces and tied gradients")
    actions: dict[str, Typical] = Field(description="F, R, B, I, W on the training thread")
    messages: Carried | None = Field(
        default=None, description="to or from the next stage, one way, until it was there; it waited for no other"
    )
    reductions: Carried | None = Field(default=None, description="all-reduce of one section; waits for peers included")
    round_s: float | None = Field(
        default=None, description="of the all-reduce of the fastest vote: latency, since a vote has hardly any bytes"
    )
    compressed: Compressed = Field(default=Compressed(), description="of all that the rank sent in these steps")

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
        round_s=min((each.round_s for each in found if each.round_s is not None), default=None),
        compressed=reduce(Compressed.plus, (each.compressed for each in found)),
    )


def of_stage(replicas: Iterable[RankTimes]) -> RankTimes:
    """Times of a stage, from those of its replicas; all-reduces are of the replica that waited least for others.

    Raises:
        ValueError: there is none.
    """
    found = list(replicas)
    reductions = [each.reductions for each in found if each.reductions is not None]
    fastest = min(reductions, key=lambda each: each.seconds, default=None)
    return merged(found).model_copy(update={"reductions": fastest})


def _typical(values: list[Typical]) -> Typical:
    count = sum(each.seen for each in values)
    return Typical(count, sum(each.seen * each.seconds for each in values) / count)


def _carried(values: list[Carried]) -> Carried | None:
    count = sum(each.seen for each in values)
    if not count:
        return None
    size_bytes = sum(each.seen * each.size_bytes for each in values) / count
    return Carried(count, size_bytes, sum(each.seen * each.seconds for each in values) / count)


MOST_ROWS = 200_000
"""Of one kind in one rank's timeline."""


class StepParts(Value):
    """Seconds of a predicted step by what the average GPU spends them on; the parts add up to the step."""

    compute_s: float
    transfer_s: float = Field(description="idle while what runs next is on its way")
    reduce_s: float = Field(description="all-reduces that no computation hides")
    optimizer_s: float
    idle_s: float = Field(description="filling, draining, uneven stages")


class Did(NamedTuple):
    """An action of a stage, or a wait for what that action needs."""

    kind: str
    """F, R, B, I or W"""
    micro_batch: int
    """counts within the replica"""
    begin_s: float
    end_s: float


class EndPart(NamedTuple):
    """What follows the actions of a step."""

    name: str
    """reduce, share, vote, apply, gather or save"""
    begin_s: float
    end_s: float


class Sent(NamedTuple):
    """A message to a neighbouring stage: from the moment at which the stage let go of it until it was delivered."""

    kind: str
    """activation or gradient"""
    micro_batch: int
    size_bytes: int
    begin_s: float
    end_s: float


class Came(NamedTuple):
    """A message from a neighbouring stage was here, whole."""

    kind: str
    """activation or gradient"""
    micro_batch: int
    at_s: float


class Summed(NamedTuple):
    """An all-reduce of one section's gradients, in the background."""

    size_bytes: int
    begin_s: float
    end_s: float


class RankTimeline(Value):
    """One step of one rank. Seconds count from ``zero_s`` of the rank's own clock."""

    generation: int
    step: int
    rank: int = Field(ge=0)
    clock: str = Field(max_length=128, description="ranks with the same one share a clock")
    zero_s: float = Field(allow_inf_nan=False, description="begin of the step")
    micro_batches: Annotated[tuple[int, ...], Field(max_length=MOST_ROWS)] = Field(
        description="numbers within the global batch, by those within the replica: after a loss, a step may be the rest"
    )
    actions: Annotated[tuple[Did, ...], Field(max_length=MOST_ROWS)]
    waits: Annotated[tuple[Did, ...], Field(max_length=MOST_ROWS)] = ()
    ends: Annotated[tuple[EndPart, ...], Field(max_length=64)] = ()
    sent: Annotated[tuple[Sent, ...], Field(max_length=MOST_ROWS)] = ()
    came: Annotated[tuple[Came, ...], Field(max_length=MOST_ROWS)] = ()
    sums: Annotated[tuple[Summed, ...], Field(max_length=MOST_ROWS)] = ()

    @property
    def end_s(self) -> float:
        """End of the step, from ``zero_s``."""
        return max((row.end_s for rows in (self.actions, self.ends) for row in rows), default=0.0)


class StepTimeline(Value):
    """One step of all ranks that are still there to tell."""

    format: Literal["varuna-timeline"] = "varuna-timeline"
    version: Literal[1] = 1
    step: int
    generation: int
    plan: Plan
    ranks: tuple[RankTimeline, ...]
    missing: Mapping[int, str] = Field(default={}, description="why a rank has told nothing")
