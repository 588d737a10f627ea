"""Logs of an agent's workers on their way to the manager: read from files, so that nothing piles up in memory."""

import contextlib
from pathlib import Path

from varuna.fleet.net.protocol import OUTPUT_CHUNK_BYTES, Output

WINDOW_BYTES = 512 * 2**10


class LogForwarder:
    """Knows how far each log was sent; for one thread.

    Offsets count what a worker wrote; a file that somebody truncated since begins further on.

    Args:
        folder: has ``<worker>.log``, of one agent's workers.
        window_bytes: no more is sent before the manager has it.
        chunk_bytes: of one output, at most.
    """

    def __init__(
        self, folder: Path, *, window_bytes: int = WINDOW_BYTES, chunk_bytes: int = OUTPUT_CHUNK_BYTES
    ) -> None:
        self._folder, self._window_bytes, self._chunk_bytes = folder, window_bytes, chunk_bytes
        self._sent: dict[str, int] = {}
        self._begins: dict[str, int] = {}  # offset of the first byte in the file
        self._sizes: dict[str, int] = {}  # of the file, when it was looked at last
        self._under_way = 0
        self.epoch = 0
        """The connection's epoch; what was taken in one says nothing about the next."""

    def begin(self, epoch: int, kept: dict[str, int]) -> None:
        """Begin a new epoch; ``kept`` says how much of each log the manager has."""
        self.epoch, self._sent, self._under_way = epoch, dict(kept), 0

    def confirmed(self, outputs: list[Output]) -> None:
        """Note that the manager has these outputs."""
        self._under_way = max(0, self._under_way - sum(len(output.data) for output in outputs))

    def next_outputs(self) -> list[Output]:
        """Outputs to send now; a log that cannot be read, such as one that was just removed, is skipped."""
        taken: list[Output] = []
        for path in sorted(self._folder.glob("*.log")):
            with contextlib.suppress(OSError):
                self._take_from(path, taken)
        return taken

    def _take_from(self, path: Path, taken: list[Output]) -> None:
        worker = path.stem
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < (known := self._sizes.get(worker, 0)):
                self._begins[worker] = self._begins.get(worker, 0) + known
            self._sizes[worker] = size
            begin = self._begins.get(worker, 0)
            self._sent[worker] = max(begin, self._sent.get(worker, 0))
            while (offset := self._sent[worker]) < begin + size and self._under_way < self._window_bytes:
                file.seek(offset - begin)
                data = file.read(self._chunk_bytes)
                if not data:
                    break
                taken.append(Output(worker=worker, offset=offset, data=data))
                self._sent[worker] = offset + len(data)
                self._under_way += len(data)
