"""Logs of an agent's workers on their way to the manager: read from files, so that nothing piles up in memory."""

from pathlib import Path

from varuna.fleet.protocol import OUTPUT_CHUNK_BYTES, Output

_WINDOW_BYTES = 512 * 2**10


class LogForwarder:
    """Knows how far each log was sent; for one thread.

    Args:
        folder: has ``<worker>.log``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}
        self._under_way = 0
        self.epoch = 0
        """Of the uplink: what was taken in one is worth nothing in the next."""

    def begin(self, epoch: int, kept: dict[str, int]) -> None:
        """A new epoch; ``kept`` says how much of each log the manager has."""
        self.epoch, self._sent, self._under_way = epoch, dict(kept), 0

    def confirmed(self, outputs: list[Output]) -> None:
        """The manager has these."""
        self._under_way = max(0, self._under_way - sum(len(output.data) for output in outputs))

    def take(self) -> list[Output]:
        """What may be sent now."""
        taken: list[Output] = []
        for path in sorted(self._folder.glob("*.log")):
            worker, size = path.stem, path.stat().st_size
            with path.open("rb") as file:
                while (offset := self._sent.get(worker, 0)) < size and self._under_way < _WINDOW_BYTES:
                    file.seek(offset)
                    data = file.read(OUTPUT_CHUNK_BYTES)
                    if not data:
                        break
                    taken.append(Output(worker=worker, offset=offset, data=data))
                    self._sent[worker] = offset + len(data)
                    self._under_way += len(data)
        return taken
