"""The run's SQLite file: one place for its events, its machines and its tokens."""

import sqlite3
from pathlib import Path

from varuna.core.errors import FleetError

FILE = "run.db"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    sha256 TEXT PRIMARY KEY, uses INTEGER NOT NULL, expires REAL NOT NULL, made REAL NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY, secret_sha256 TEXT NOT NULL, hostname TEXT NOT NULL, joined REAL NOT NULL,
    revoked TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS nodes_by_secret ON nodes (secret_sha256);
"""


def open_database(run_dir: Path) -> sqlite3.Connection:
    """A connection, for one thread at a time; what is committed survives the death of this process.

    Raises:
        FleetError: the file is not a database, or is of another version.
    """
    path = run_dir / FILE
    try:
        connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
        path.chmod(0o600)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(_SCHEMA)
    except sqlite3.Error as error:
        raise FleetError(f"{path} cannot be used ({error}). Pass another --run-dir, or move the file away.") from error
    return connection


def unreadable(path: Path, error: Exception) -> str:
    """Say that a file cannot be read, and why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]  # of pydantic's: how many, where, what
    why = ": ".join(lines[1:3] or lines) or type(error).__name__
    return f"{path} cannot be read: it is damaged, or another version of Varuna wrote it ({why})"
