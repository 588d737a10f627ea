"""Requests of people that are not met yet."""

from dataclasses import dataclass

from varuna.fleet.state.worker import changed

MORPH_REQUESTED = "a morph was requested"
"""The reason of a morph for which somebody asks without one."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Requests for a morph, a checkpoint, or the run's end."""

    morph: str | None = None
    """The reason why a morph is asked for."""
    save: bool = False
    """Somebody wants a checkpoint now, and rank 0 has not been told."""
    finish: str | None = None
    """The reason why the run is to end after the current step."""

    def without_morph(self) -> "Requests":
        """These, once that is answered."""
        return changed(self, morph=None)

    def without_save(self) -> "Requests":
        """These, once rank 0 is told."""
        return changed(self, save=False)

    def of_next_training(self) -> "Requests":
        """Those that outlast a training."""
        return Requests(finish=self.finish)
