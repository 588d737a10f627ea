"""The memory by which an agent shortens its workers' beats: one that is as before takes its name only.

Both ends of a connection remember the same beats, since they see the same pulses in the same order. On a new connection
both begin with none.
"""

from collections.abc import Mapping

from varuna.core.messages import Beat

REMEMBERED = 1024
"""Workers whose newest beat both ends remember; those whose beat is oldest are forgotten first."""


class BeatMemory:
    """The newest beats that went over one connection; one on each side."""

    def __init__(self) -> None:
        self._newest: dict[str, Beat] = {}

    def shorten(self, beats: Mapping[str, Beat]) -> dict[str, Beat | None]:
        """Return what to say of these beats; measurements are means since the beat before, so they are always news."""
        known = self._newest
        said = {
            worker: None if beat.forward_s is None and beat.times is None and known.get(worker) == beat else beat
            for worker, beat in beats.items()
        }
        self._remember(beats)
        return said

    def restore(self, said: Mapping[str, Beat | None]) -> dict[str, Beat]:
        """The beats that were meant; one that is as before is the same object.

        Raises:
            ValueError: there was none before.
        """
        beats = {}
        for worker, beat in said.items():
            meant = beat if beat is not None else self._newest.get(worker)
            if meant is None:
                raise ValueError(f"the first beat of worker {worker} is said to be as the one before")
            beats[worker] = meant
        self._remember(beats)
        return beats

    def _remember(self, beats: Mapping[str, Beat]) -> None:
        self._newest.update(beats)
        if len(self._newest) > REMEMBERED:
            self._newest = dict(list(self._newest.items())[-REMEMBERED:])
