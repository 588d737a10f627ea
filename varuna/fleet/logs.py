"""Logs of workers on other machines, kept here after the machines are gone."""

import logging
from pathlib import Path

from varuna.fleet.protocol import Output

MAX_LOG_BYTES = 256 * 2**20
"""More of a worker's output than this stays on its machine."""

log = logging.getLogger(__name__)


class LogKeeper:
    """Files in one folder, written by one thread.

    Args:
        folder: gets ``<worker>.log``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._broken: set[str] = set()  # workers whose output could not be written

    def begin(self, worker: str) -> None:
        """A worker that writes nothing has an empty log."""
        (self._folder / f"{worker}.log").touch()

    def write(self, output: Output) -> None:
        """Append; what is there already is not written twice. From an error of the disk on, the rest stays away.

        Raises:
            ValueError: bytes in between are missing.
        """
        path = self._folder / f"{output.worker}.log"
        size = path.stat().st_size if path.exists() else 0
        if size >= MAX_LOG_BYTES or output.worker in self._broken:
            return
        if output.offset > size:
            raise ValueError(f"output of {output.worker} starts at byte {output.offset}, {size} are here")
        if fresh := output.data[size - output.offset :]:
            try:
                with path.open("ab", buffering=0) as file:
                    file.write(fresh[: MAX_LOG_BYTES - size])
            except OSError as error:
                self._broken.add(output.worker)
                log.warning("%s ends here: %s. The rest stays on the worker's machine.", path, error.strerror)

    def sizes(self, node: str) -> dict[str, int]:
        """Bytes that are here, by worker of a node."""
        return {path.stem: path.stat().st_size for path in self._folder.glob(f"{node}.*.log")}
