"""Bounds on ranks' waits for each other: the report of a wait that lasts, and its end once it cannot be right.

A rank that computes, reads samples or runs the user's code may take its time: the others wait, and say for whom. What
cannot be right is that no rank does anything. So a wait ends in an error

- once every rank has waited for another one, in the same waits, for far longer than a step takes: a deadlock;
- once a rank that is waited for has given no sign of life for long: it is frozen or cut off;
- once a rank that is waited for has been at one piece of the user's code for far longer than anything took before: it
  ends itself, with its stack (``overdue``), but never in its first step, while it compiles, or under a debugger;
- after two hours without a word of those that are waited for, since the store that carries words is away;
- after a day, whatever the reason.

All of it follows from facts that are passed in: nothing here asks a clock, a store or a rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from pydantic import Field

from varuna.core.value import Value

_NAMED = 4
"""Most ranks whose activity is told one by one."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Bounds of waits, in seconds."""

    word_s: float = 10.0
    """Ranks tell each other what they do this often."""
    told_s: float = 30.0
    """A wait says so after this long."""
    look_s: float = 5.0
    """Once it has said so, it looks this often whether it can still be right."""
    stalled_s: float = 300.0
    """Least time for which all ranks of a step must have waited for each other: a message may be on its way."""
    steps: float = 20.0
    """The same in steps, each as long as was predicted or measured, whichever is longer."""
    forming_s: float = 1800.0
    """The same while a generation forms, when whole sections travel."""
    silent_s: float = 600.0
    """A rank that is waited for must have given a sign of life within this time."""
    fresh_s: float = 60.0
    """Without a sign of life within this time it is not known to wait: it may only be unable to tell."""
    blind_s: float = 7200.0
    """For those of whom nothing is known, because the store is away: they may be at work."""
    busy_s: float = 3600.0
    """Least time for which others wait for one piece of a rank's own work, once it has made its first steps."""
    busy_steps: float = 100.0
    """The same in steps."""
    busy_times: float = 4.0
    """The same beside the longest such piece that ended well."""
    last_s: float = 86_400.0
    """Bound on any wait, whatever the reason."""

    def stalled_after_s(self, *step_s: float) -> float:
        """Return the seconds that all ranks may wait for each other in a step of ``step_s``, predicted or measured."""
        return max(self.stalled_s, self.steps * max(step_s, default=0.0))

    def busy_after_s(self, longest_s: float, *step_s: float) -> float:
        """Return the seconds that a piece of a rank's own work may take that others wait for, by the longest so far."""
        return max(self.busy_s, self.busy_times * longest_s, self.busy_steps * max(step_s, default=0.0))


class Awaited(NamedTuple):
    """The object of a rank's wait, and the ranks that it comes from."""

    what: str
    on: tuple[int, ...] = ()
    """the ranks that it comes from; none: this rank's own work, such as reading samples"""
    by_device: bool = False
    """the device works on it: it takes no longer than a step may"""
    checks: bool = False
    """first values are made, and the model is compared with plain PyTorch"""


class Waiting(NamedTuple):
    """A wait of the training thread."""

    number: int
    """of this wait: another number is progress"""
    since_s: float
    awaited: Callable[[], Awaited]
    """asked whenever it is told: what is there already is not waited for"""


class Doing(Value):
    """The activity of a rank, as it tells the others."""

    text: str
    on: tuple[int, ...] = Field(default=(), description="ranks that it waits for; none: it is at work")
    wait: int = Field(default=0, description="number of its wait")
    tick: int = Field(default=0, description="counts what it tells: a sign of life")
    work: str = Field(default="", description="what it is at, if that must end within a bound; empty: it may take long")


class Heard(NamedTuple):
    """The newest word of a rank, by this rank's clock."""

    doing: Doing
    since_s: float
    """it is in the same wait, or at work, since then"""
    alive_s: float
    """its newest sign of life"""
    read_s: float
    """time at which its word was last read: nothing is known of the time since"""

    @property
    def silent_s(self) -> float:
        """Seconds for which it is known to have given no sign of life."""
        return self.read_s - self.alive_s


def heard_after(before: Heard | None, doing: Doing, now_s: float) -> Heard:
    """Return a rank's word, after what was heard ``before``."""
    if before is None:
        return Heard(doing, now_s, now_s, now_s)
    same = (before.doing.wait, bool(before.doing.on)) == (doing.wait, bool(doing.on))
    silent = before.doing.tick == doing.tick
    return Heard(doing, before.since_s if same else now_s, before.alive_s if silent else now_s, now_s)


@dataclass(frozen=True)
class Scene:
    """A rank's knowledge of its generation while it waits."""

    who: str
    """waits, such as ``rank 1 (stage 0)``"""
    rank: int
    ranks: Sequence[int]
    """all that run a stage"""
    heard: Mapping[int, Heard]
    """by rank; those that were not heard are missing"""
    stalled_s: float
    """see ``Patience.stalled_after_s``"""

    def describe_wait(self, awaited: Awaited, waited_s: float) -> str:
        """Write the report of a wait that lasts."""
        return f"{self.who} has waited {waited_s:.0f} s for {_source(awaited)}{self._others(awaited)}"

    def fault(self, waiting: Waiting, now_s: float, patience: Patience) -> str | None:
        """Return why a wait must end, if it must."""
        awaited, waited_s = waiting.awaited(), now_s - waiting.since_s
        waits = f"{self.who} waited {waited_s:.0f} s for {_source(awaited)}"
        if circle := self.circle(waiting, patience, self.stalled_s):
            return f"{waits}. {circle}"
        if awaited.by_device and waited_s >= self.stalled_s:
            return f"{waits}: it hangs. Look at the machine's log, then start the same command again to resume."
        silent = [rank for rank in awaited.on if rank in self.heard and self.heard[rank].silent_s >= patience.silent_s]
        if silent:
            return (
                f"{waits}, and {_ranks(silent)} gave no sign of life for {self.heard[silent[0]].silent_s:.0f} s: "
                "frozen or cut off. Look at its log, then start the same command again to resume."
            )
        is_blind = bool(awaited.on) and self.heard.keys().isdisjoint(awaited.on)
        if waited_s >= (min(patience.blind_s, patience.last_s) if is_blind else patience.last_s):
            return (
                f"{waits}, and nothing arrived{self._others(awaited)}. The peer may be frozen or cut off; look at "
                "its log, then start the same command again to resume."
            )
        return None

    def circle(self, waiting: Waiting, patience: Patience, least_s: float) -> str | None:
        """Write what all ranks wait for, if they have waited for each other for ``least_s``; else None."""
        awaited = waiting.awaited()
        stalled_s = self._stalled_s(awaited, waiting.since_s, patience)
        if stalled_s < least_s:
            return None
        return (
            f"For {stalled_s:.0f} s every rank has waited for another one ({self._everybody(awaited)}). Do all "
            "ranks make the same calls, such as trainer.evaluate, at the same steps? If so, this is a bug in "
            "Varuna: please report this text. Start the same command again to resume."
        )

    def _stalled_s(self, awaited: Awaited, since_s: float, patience: Patience) -> float:
        """Return the seconds for which all ranks are known to wait for others; 0 if one works, or was not heard."""
        others = [self.heard.get(rank) for rank in self.ranks if rank != self.rank]
        known = [each for each in others if each is not None and each.doing.on and each.silent_s < patience.fresh_s]
        if not awaited.on or not known or len(known) < len(others):
            return 0.0
        # From the last one that began to wait, to the oldest word of a wait: between them all are known to have waited.
        return min(each.read_s for each in known) - max(since_s, *(each.since_s for each in known))

    def _others(self, awaited: Awaited) -> str:
        """Say what the awaited ranks do: first those at work, then those that wait for others themselves."""
        known = [(rank, self.heard[rank].doing) for rank in awaited.on if rank in self.heard]
        known.sort(key=lambda each: bool(each[1].on))
        said = "; ".join(f"rank {rank}: {doing.text}" for rank, doing in known[:_NAMED])
        more = f"; and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
        return f" ({said}{more})" if said else ""

    def _everybody(self, awaited: Awaited) -> str:
        """Write what each rank waits for, equal waits together."""
        said = {rank: self.heard[rank].doing.text for rank in self.ranks if rank != self.rank}
        said[self.rank] = f"waits for {_source(awaited)}"
        texts = sorted(said.items(), key=lambda each: (each[1], each[0]))
        found = [(text, [rank for rank, _ in rows]) for text, rows in groupby(texts, key=lambda each: each[1])]
        return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in found)


def _source(awaited: Awaited) -> str:
    return f"{awaited.what} from {_ranks(awaited.on)}" if awaited.on else awaited.what


def doing_of(activity: str, waiting: Waiting | None, *, tick: int = 0, place: str = "", bounded: bool = False) -> Doing:
    """Describe what a rank does or waits for, as it tells the others.

    Args:
        activity: what it does, such as "runs step 3".
        waiting: what it waits for meanwhile, if anything.
        tick: see ``Doing``.
        place: file and line of the user's code that it runs, if any.
        bounded: its own work must end within a bound.
    """
    awaited = None if waiting is None else waiting.awaited()
    text = activity if awaited is None else f"{activity}: waits for {_source(awaited)}"
    if awaited is not None and awaited.on:
        return Doing(text=text, on=awaited.on, wait=waiting.number if waiting else 0, tick=tick)
    where = f", at {place}" if place else ""
    return Doing(text=f"{text}{where}", wait=waiting.number if waiting else 0, tick=tick, work=text if bounded else "")


def overdue(
    rank: int, mine: Doing, busy_s: float, bound_s: float, heard: Mapping[int, Heard], patience: Patience
) -> str | None:
    """Return why this rank must end itself: others have waited long for work of its own that does not end.

    Args:
        rank: this one.
        mine: what it does.
        busy_s: for how long it has been at it.
        bound_s: see ``Patience.busy_after_s``.
        heard: the newest words of others.
        patience: how fresh a word must be.
    """
    waits = {
        other: each.doing.text
        for other, each in heard.items()
        if rank in each.doing.on and each.silent_s < patience.fresh_s and each.read_s > each.since_s
    }
    if not mine.work or busy_s < bound_s or not waits:
        return None
    said = "; ".join(f"rank {other}: {text}" for other, text in list(waits.items())[:_NAMED])
    wait = "waits" if len(waits) == 1 else "wait"
    return (
        f"ends itself, since for {busy_s:.0f} s it {mine.text}, while {_ranks(waits)} {wait} for it ({said}). Nothing "
        "that it did before took a quarter as long, nor do a hundred steps. If this is honest work, give it more time "
        "with VARUNA_PATIENCE=SECONDS, or let all ranks do it together."
    )


def _ranks(ranks: Iterable[int]) -> str:
    """Write ``rank 1``, ``ranks 1 and 2``, ``ranks 0, 3 and 5``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
