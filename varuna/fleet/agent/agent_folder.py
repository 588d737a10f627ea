"""An agent's folder: its identity, which outlives restarts, and its workers' logs."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from varuna.core.errors import FleetError, UsageError
from varuna.core.value import Value
from varuna.fleet.net.ca import alone, fingerprint, make_private, write_private
from varuna.fleet.net.protocol import Identity
from varuna.process.file_lock import GOODBYE_S, FolderLock, own

_FILE, _WISH = "agent.json", "joining.json"


class JoinAttempt(Value):
    """The secret with which a machine is about to join, written first, so that a lost answer costs no token."""

    secret: str
    token_sha256: str
    fingerprint: str


class AgentIdentity(Value):
    """The identity by which a restarted agent is the same machine."""

    identity: Identity
    certificate_pem: str
    fingerprint: str
    token_sha256: str = Field(default="", description="of the token that it was joined with")
    next_worker: int = Field(default=0, description="numbers of workers are never used twice")


class AgentFolder:
    """The folder; only its owner may read the card, since it holds the agent's secret.

    Where it cannot be written, such as on a full or a read-only disk, each method says so by a ``UsageError``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._writing():
            make_private(folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{error.filename or self.folder} is not writable ({error.strerror}). Make room on its disk, or mount "
                "it for writing; or pass another --state-dir."
            ) from error

    def logs_of(self, card: AgentIdentity) -> Path:
        """Logs of this identity's workers: another run, or another identity in this one, must not be sent them.

        Those of the identity before this one are kept, older ones go.
        """
        all_logs = self.folder / "logs"
        mine = all_logs / f"{card.identity.node}-{card.fingerprint[:8]}"
        with self._writing():
            mine.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = sorted((path for path in all_logs.iterdir() if path.is_dir() and path != mine), key=_changed_s)
        for old in others[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        return mine

    def prune(self, card: AgentIdentity, kept: int) -> None:
        """Remove all but the newest logs of this identity's workers."""
        with contextlib.suppress(OSError, UsageError):
            logs = sorted(self.logs_of(card).glob("*.log"), key=_changed_s)
            for old in logs[:-kept]:
                old.unlink(missing_ok=True)

    def own(self, goodbye_s: float = GOODBYE_S) -> FolderLock:
        """Be the one agent with this folder.

        Raises:
            FleetError: another one has it.
        """
        with self._writing():
            return own(self.folder, "agent", remedy="Stop that one, or pass another --state-dir.", goodbye_s=goodbye_s)

    def read(self) -> AgentIdentity | None:
        """The card; None if there is none.

        Raises:
            FleetError: it cannot be read.
        """
        path = self.folder / _FILE
        if not path.exists():
            return None
        try:
            card = AgentIdentity.model_validate_json(path.read_bytes())
            if fingerprint(card.certificate_pem) != card.fingerprint:
                raise ValueError("the certificate does not match the fingerprint")
        except (OSError, ValueError, FleetError) as error:  # a ValidationError is a ValueError
            raise FleetError(f"{path} is damaged. Remove it and join again with a new token.") from error
        return card.model_copy(update={"certificate_pem": alone(card.certificate_pem)})

    def write(self, card: AgentIdentity) -> None:
        """Keep the card, whole or not at all."""
        with self._writing():
            write_private(self.folder / _FILE, card.model_dump_json().encode())
            (self.folder / _WISH).unlink(missing_ok=True)

    def attempt(self, token_sha256: str, fingerprint: str) -> JoinAttempt:
        """The attempt that was begun with this token, or a new one with a secret that nobody else has seen."""
        path = self.folder / _WISH
        with contextlib.suppress(OSError, ValidationError):
            begun = JoinAttempt.model_validate_json(path.read_bytes())
            if (begun.token_sha256, begun.fingerprint) == (token_sha256, fingerprint):
                return begun
        attempt = JoinAttempt(secret=secrets.token_urlsafe(32), token_sha256=token_sha256, fingerprint=fingerprint)
        with self._writing():
            write_private(path, attempt.model_dump_json().encode())
        return attempt

    def forget(self) -> None:
        """Forget the identity, which is void."""
        with self._writing():
            (self.folder / _FILE).unlink(missing_ok=True)


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime
