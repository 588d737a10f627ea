"""The user's script: its job, its trainings, and how far its workers are through with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna.core.messages import Hello
from varuna.core.model import JobFacts
from varuna.fleet.state.run_events import TrainingEnded


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script that all workers run."""

    version: str = ""
    """Of Varuna, the same for all workers."""
    trainings: tuple[TrainingEnded, ...] = ()
    """Those that are over."""
    job: JobFacts | None = None
    """Of the present training."""
    ahead: Mapping[str, Hello] = field(default_factory=dict)
    """By worker: words of those that wait for the next training."""
    left_step: int = 0
    """Steps of the training, by those who have left it."""
    main_ended: bool = False
    """Rank 0's script came to its end."""
    ended: bool = False
    """Some worker's did."""

    def at_next_training(self, ended: TrainingEnded) -> "Script":
        """The script, before its next training."""
        return Script(version=self.version, trainings=(*self.trainings, ended))
