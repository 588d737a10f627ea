"""The record of the present training's steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna.core.messages import Vote
from varuna.core.saved import SavedShard


@dataclass(frozen=True, kw_only=True)
class RecordedSteps:
    """Steps that are recorded and saved, which ``fleet.machine.commit`` keeps."""

    step: int = -1
    """The newest that was recorded."""
    at_s: float = 0.0
    """Time at which it was."""
    wall_s: float = 0.0
    """Seconds that it took."""
    every_s: float = 0.0
    """From one recorded step to the next, with what the script does in between."""
    saved_step: int = 0
    """Steps in the newest checkpoint that was committed."""
    early_shards: tuple[SavedShard, ...] = ()
    """Of steps whose votes were not heard yet, by step."""
    lineage: int = 0
    """Oldest generation whose votes count: a rollback abandons what came before."""
    votes: Mapping[int, Vote] = field(default_factory=dict)
    """By step: the newest recorded one, and those that are not recorded yet."""
