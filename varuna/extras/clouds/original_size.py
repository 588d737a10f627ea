"""The size that a group had before a run asked for more: kept in the run's database, since managers come and go."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from varuna.core.errors import FleetError
from varuna.fleet.run_folder.database import FILE, open_database


class OriginalSize:
    """One size, until it is given back; may be used by any thread, also while a manager writes its journal.

    Args:
        run_dir: an existing folder.
        group: whose size.
    """

    def __init__(self, run_dir: Path, group: str) -> None:
        self._run_dir, self._name = run_dir, _fact(group)

    def keep_size(self, nodes: int) -> int:
        """Keep a size, unless one is kept already; return the one that is kept.

        Raises:
            FleetError: the database cannot be used.
        """
        with self._database() as database:
            database.execute("INSERT OR IGNORE INTO facts (name, body) VALUES (?, ?)", (self._name, str(nodes)))
            [body] = database.execute("SELECT body FROM facts WHERE name = ?", (self._name,)).fetchone()
        return int(body)

    def drop(self) -> None:
        """Forget the size, which was given back.

        Raises:
            FleetError: the database cannot be used.
        """
        with self._database() as database:
            database.execute("DELETE FROM facts WHERE name = ?", (self._name,))

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        database = open_database(self._run_dir)
        try:
            yield database
        except sqlite3.Error as error:
            raise FleetError(f"the {self._name} cannot be stored in {self._run_dir}: {error}") from error
        finally:
            database.close()


def user_of(group: str, among: Iterable[Path]) -> Path | None:
    """Find the folder of the first run among these that has changed this group's size, and has not given it back."""
    for folder in among:
        try:
            with closing(sqlite3.connect(f"{(folder / FILE).as_uri()}?mode=ro", uri=True, timeout=2.0)) as database:
                if database.execute("SELECT 1 FROM facts WHERE name = ?", (_fact(group),)).fetchone() is not None:
                    return folder
        except sqlite3.Error:
            continue  # whatever that folder is, it asks for no machines
    return None


def _fact(group: str) -> str:
    return f"size before: {group}"
