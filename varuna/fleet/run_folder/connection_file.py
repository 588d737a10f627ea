"""The command line's way to a run: a file in its folder has its manager's address, and each user's runs are noted."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from varuna.core.errors import UsageError
from varuna.core.value import Value
from varuna.fleet.net.ca import write_private
from varuna.fleet.net.client import ManagerRemote
from varuna.fleet.run_folder.join_file import FILE as JOIN_FILE
from varuna.process.file_lock import is_owned

_FILE = "access.json"


class Access(Value):
    """A manager's address, the means to recognise it, and the operator's token."""

    host: str
    port: int
    certificate_pem: str | None
    token: str

    def remote(self) -> ManagerRemote:
        """Return a client for requests to this manager."""
        return ManagerRemote(self.host, self.port, self.certificate_pem, self.token)


class KnownRun(NamedTuple):
    """A run of this user that was started on this machine."""

    folder: Path
    started_s: float
    """seconds since 1970"""
    is_live: bool
    """Its manager lives."""


def publish_access(run_dir: Path, access: Access) -> None:
    """Write it down for this user alone, and note the run, as the newest one."""
    write_private(run_dir / _FILE, access.model_dump_json().encode())
    folder, home = str(run_dir.absolute()), _home()
    note = home / "runs" / hashlib.sha256(folder.encode()).hexdigest()[:16]
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        for path in (note, home / "newest-run"):
            path.write_text(json.dumps(folder))
    except OSError:
        return  # a home that cannot be written: --run says it then


def remember(run_dir: Path) -> Callable[[], None]:
    """Note what the files say that lead to a run's manager; the answer writes that again, as far as the disk lets it.

    For a manager that learns later that another one lives, since a network drive has no locks.
    """
    before: dict[Path, bytes] = {}
    for path in (run_dir / _FILE, run_dir / JOIN_FILE):
        with suppress(OSError):
            before[path] = path.read_bytes()

    def put_back() -> None:
        for path, content in before.items():
            with suppress(OSError):
                write_private(path, content)

    return put_back


def known_runs() -> list[KnownRun]:
    """Runs of this user whose folders are still there, the newest first; notes of others are removed."""
    found = []
    for note in (_home() / "runs").glob("*"):
        with suppress(OSError, ValueError):
            folder, started_s = Path(json.loads(note.read_text())), note.stat().st_mtime
            if (folder / _FILE).is_file():
                found.append(KnownRun(folder, started_s, is_owned(folder)))
            else:
                note.unlink()
    return sorted(found, key=lambda run: run.started_s, reverse=True)


def read_access(run_dir: Path) -> Access | None:
    """Read the address of the manager before this one, and its operator's token; None if there was none."""
    try:
        return Access.model_validate_json((run_dir / _FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def find(run_dir: Path | None) -> tuple[Path, Access]:
    """The folder of a run, and how to reach its manager. Without a folder: the run that lives, else the newest one.

    Raises:
        UsageError: there is none, or several live.
    """
    folder = run_dir or _only_run()
    try:
        return folder, Access.model_validate_json((folder / _FILE).read_bytes())
    except OSError as error:
        if run_dir is None and not folder.exists():
            raise UsageError(
                "your newest run has finished and its folder was removed (`varuna run --run-dir DIR` keeps it). "
                "Use --run to name the folder of another run; `varuna list` shows them."
            ) from error
        raise UsageError(
            f"there is no run in {folder} ({error.strerror}: {_FILE}). Use --run with the folder "
            "that `varuna run` or `varuna manager` printed; `varuna list` shows those of this machine."
        ) from error
    except ValidationError as error:
        raise UsageError(f"{folder / _FILE} is damaged, or was written by another version of Varuna") from error


def keep_copy(name: str, access: str) -> Path:
    """Keep how to reach a manager of another machine (JSON) in a folder of this user's; returns that folder.

    Raises:
        UsageError: it cannot be written.
    """
    folder = _home() / "elsewhere" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(folder / _FILE, access.encode())
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}. Set XDG_STATE_HOME.") from error
    return folder


def _only_run() -> Path:
    live = [run.folder for run in known_runs() if run.is_live]
    if len(live) > 1:
        listed = "".join(f"\n  --run {folder}" for folder in live)
        raise UsageError(f"{len(live)} of your runs are running. Say which one, the newest is first:{listed}")
    if live:
        return live[0]
    try:
        return Path(json.loads((_home() / "newest-run").read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(
            "no run of this user was found on this machine. Start one, or use --run to name the folder of a run."
        ) from error


def _home() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "varuna"
