"""How the command line finds a run: a file in its folder says where its manager is, and the newest run is noted."""

import json
import os
from pathlib import Path

from pydantic import ValidationError

from varuna.core.errors import UsageError
from varuna.core.value import Value
from varuna.fleet.net.ca import write_private
from varuna.fleet.net.client import ManagerRemote

_FILE = "access.json"


class Access(Value):
    """Where a manager is, how to recognise it, and the operator's token."""

    host: str
    port: int
    certificate_pem: str | None
    token: str

    def remote(self) -> ManagerRemote:
        """Return a client for requests to this manager."""
        return ManagerRemote(self.host, self.port, self.certificate_pem, self.token)


def publish(run_dir: Path, access: Access) -> None:
    """Write it down for this user alone, and note that this is the newest run."""
    write_private(run_dir / _FILE, access.model_dump_json().encode())
    newest = _newest_file()
    try:
        newest.parent.mkdir(parents=True, exist_ok=True)
        newest.write_text(json.dumps(str(run_dir.absolute())))
    except OSError:
        return  # a home that cannot be written: --run says it then


def read_token(run_dir: Path) -> str:
    """The operator's token of a run that was here before; empty if there is none."""
    try:
        return Access.model_validate_json((run_dir / _FILE).read_bytes()).token
    except (OSError, ValidationError):
        return ""


def find(run_dir: Path | None) -> tuple[Path, Access]:
    """The folder of a run, or of the newest one of this user, and how to reach its manager.

    Raises:
        UsageError: there is none.
    """
    folder = run_dir or _newest()
    try:
        return folder, Access.model_validate_json((folder / _FILE).read_bytes())
    except OSError as error:
        if run_dir is None and not folder.exists():
            raise UsageError(
                "your newest run has finished and its folder was removed (`varuna run --run-dir DIR` keeps it). "
                "Use --run to name the folder of another run."
            ) from error
        raise UsageError(
            f"there is no run in {folder} ({error.strerror}: {_FILE}). Use --run with the folder "
            "that `varuna run` or `varuna manager` printed."
        ) from error
    except ValidationError as error:
        raise UsageError(f"{folder / _FILE} is damaged, or was written by another version of Varuna") from error


def _newest() -> Path:
    try:
        return Path(json.loads(_newest_file().read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(
            "no run of this user was found on this machine. Start one, or use --run to name the folder of a run."
        ) from error


def _newest_file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "varuna" / "newest-run"
