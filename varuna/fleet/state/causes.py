"""Why a generation ended: a kind, which rules decide by, and a sentence, which people read."""

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """What ends a generation."""

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
