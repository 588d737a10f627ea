"""The file with a run's JOIN string: machines join with it, and look into it for a manager that has moved."""

from pathlib import Path

from varuna.core.errors import UsageError
from varuna.fleet.net.ca import write_private
from varuna.fleet.net.join_string import JoinString, parse_invitation

FILE = "join"


def keep_join(folder: Path, join: str) -> Path:
    """Write a JOIN string into a file of this folder that only its owner can read; returns the file."""
    path = folder / FILE
    write_private(path, f"{join}\n".encode())
    return path


def read_join(path: Path) -> JoinString:
    """The JOIN string in a file.

    Raises:
        OSError: it cannot be read.
        UsageError: it has something else.
    """
    try:
        return parse_invitation(path.read_text())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} has no JOIN string") from error


def renew_join(folder: Path, host: str, port: int, fingerprint: str) -> None:
    """Write a manager's address into the file of its run's folder, if there is one of this run.

    Raises:
        OSError: it cannot be written.
    """
    try:
        known = read_join(folder / FILE)
    except (OSError, UsageError):
        return
    if known.fingerprint == fingerprint and (known.host, known.port) != (host, port):
        keep_join(folder, str(known.model_copy(update={"host": host, "port": port})))
