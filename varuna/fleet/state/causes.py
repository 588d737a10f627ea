"""Reasons why something ends, waits or is refused: a type or a kind, which rules decide by, and a sentence for people.

No rule looks into a sentence, nor at whether there is one.
"""

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """A reason for which a generation ends."""

    LOST = "a member that it needed is gone"
    HIDDEN = "a member that it needed is out of sight, and the step stands still"
    PLANNED = "a morph after a vote, or because a machine leaves before there can be one"
    STOPPED = "a rank stopped by itself"
    REPORTED = "a rank reported a broken link, and nobody is known to be gone"
    UNREADY = "members did not get ready in time"
    LEFT = "the other ranks have left"


@dataclass(frozen=True, slots=True)
class EndCause:
    """One reason why a generation ended."""

    ending: Ending
    text: str

    @property
    def took_somebody(self) -> bool:
        """Whether the generation could not go on because a member was lost."""
        return self.ending in (Ending.LOST, Ending.HIDDEN)

    def __str__(self) -> str:
        return self.text


class Obstacle(Enum):
    """A reason for which the next generation cannot begin."""

    NO_WORKERS = "nobody is ready"
    NO_PLAN = "no plan fits"
    NO_ANSWER = "the store does not say which checkpoint is the newest"
    BREAKING = "one generation after the other breaks"


@dataclass(frozen=True, slots=True)
class Blocked:
    """The next generation cannot begin."""

    by: Obstacle
    text: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """No plan fits these workers."""

    workers: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Objection:
    """An objection to a worker's words: they cannot be true, or are of another run."""

    text: str
