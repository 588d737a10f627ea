"""Times of a rank's steps: sent with heartbeats, merged by the manager, kept with the run.

And timelines of single steps, on request: all that every rank did, as workers tell it and files of a run keep it.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from varuna.core.plan import Plan
from varuna.core.value import Value


class Typical(NamedTuple):
    """Seconds that something takes, and the number of times that it was seen."""

    seen: int
    seconds: float


class Carried(NamedTuple):
    """Bytes and seconds of a transfer, and the number of times that it was seen."""

    seen: int
    size_bytes: float
    seconds: float


class Compressed(NamedTuple):
    """Bytes of messages that crossed compressed, and bytes that were sent of them."""

    size_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Ratio of the two; 1 where there were none."""
        return self.size_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def plus(self, other: "Compressed", sign: int = 1) -> "Compressed":
        """Return both together, or the one without the other."""
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
    relayed: tuple[int, ...] = Field(
        default=(), max_length=4096, description="ranks that it reaches through another machine only"
    )

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
        # The least, since a vote takes longer only where it waits for a rank.
        round_s=min((each.round_s for each in found if each.round_s is not None), default=None),
        compressed=reduce(Compressed.plus, (each.compressed for each in found)),
        relayed=tuple(sorted({rank for each in found for rank in each.relayed})),
    )


def of_stage(replicas: Iterable[RankTimes]) -> RankTimes:
    """Return the times of a stage, from those of its replicas; all-reduces are the fastest one's, which waited least.

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


class Interval(NamedTuple):
    """Something that was done in a step, and when: an action, a wait for what an action needs, a message, a sum."""

    kind: str
    """F, R, B, I or W; reduce, share, vote, apply, gather or save after them; activation or gradient"""
    micro_batch: int
    """counts within the replica; -1 where it is of all"""
    begin_s: float
    end_s: float
    """of a message, when it was delivered; if it came from another rank, both are when it was here, whole"""
    size_bytes: int = 0
    """of a message or a sum"""
    inside_s: float = 0.0
    """of an action, within the stage's sections; on a GPU if that was asked for"""

    @property
    def seconds(self) -> float:
        """Length, in seconds."""
        return self.end_s - self.begin_s

    def since(self, zero_s: float, unit_s: float = 1.0) -> "Interval":
        """Return the same on an axis that begins at ``zero_s``, in units of ``unit_s``."""
        return self._replace(begin_s=(self.begin_s - zero_s) / unit_s, end_s=(self.end_s - zero_s) / unit_s)


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
    actions: Annotated[tuple[Interval, ...], Field(max_length=MOST_ROWS)]
    waits: Annotated[tuple[Interval, ...], Field(max_length=MOST_ROWS)] = ()
    ends: Annotated[tuple[Interval, ...], Field(max_length=64)] = ()
    sent: Annotated[tuple[Interval, ...], Field(max_length=MOST_ROWS)] = ()
    came: Annotated[tuple[Interval, ...], Field(max_length=MOST_ROWS)] = ()
    sums: Annotated[tuple[Interval, ...], Field(max_length=MOST_ROWS)] = ()

    @property
    def end_s(self) -> float:
        """End of the step, from ``zero_s``."""
        return max((row.end_s for rows in (self.actions, self.ends) for row in rows), default=0.0)


class StepTimeline(Value):
    """One step of all ranks that are still there to tell."""

    format: Literal["varuna-timeline"] = "varuna-timeline"
    version: Literal[2] = 2
    step: int
    generation: int
    plan: Plan
    ranks: tuple[RankTimeline, ...]
    missing: Mapping[int, str] = Field(default={}, description="why a rank has told nothing")
