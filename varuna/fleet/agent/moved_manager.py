"""The search for a manager that has moved: an agent reads the file that it has its JOIN string from."""

import threading
from pathlib import Path

from varuna.core.errors import UsageError
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.run_folder.join_file import read_join


class MovedManager:
    """Reads the file again whenever it is asked, on a thread of its own: a network drive may not answer.

    Only the address is taken from it, and only if the file belongs to the same run. Who answers there has to have the
    certificate of that run, as the manager before it.

    Args:
        file: with a JOIN string; None: there is nothing to look at.
        fingerprint: of the run's authority.
    """

    def __init__(self, file: Path | None, fingerprint: str) -> None:
        self._file, self._fingerprint = file, fingerprint
        self._found: JoinString | None = None
        self._look: threading.Thread | None = None

    def newest(self) -> JoinString | None:
        """Return what the newest look has found, at once, and begin the next look."""
        if self._file is not None and (self._look is None or not self._look.is_alive()):
            self._look = threading.Thread(target=self._read, args=(self._file,), name="varuna-moved", daemon=True)
            self._look.start()
        return self._found

    def _read(self, file: Path) -> None:
        try:
            found = read_join(file)
        except (OSError, UsageError):  # it is just being written, or its drive is away
            return
        if found.fingerprint == self._fingerprint:
            self._found = found
