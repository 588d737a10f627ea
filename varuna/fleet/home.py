"""An agent's folder: who it is, across restarts, and its workers' logs."""

import shutil
from pathlib import Path

from pydantic import Field

from varuna.core.errors import FleetError
from varuna.core.value import Value
from varuna.fleet.authority import alone, fingerprint, write_private
from varuna.fleet.ownership import Ownership, own
from varuna.fleet.protocol import Identity

_FILE = "agent.json"


class Card(Value):
    """What makes an agent come back as itself."""

    identity: Identity
    certificate_pem: str
    fingerprint: str
    next_worker: int = Field(default=0, description="numbers of workers are never used twice")


class Home:
    """The folder; only its owner may read the card, since it holds the agent's secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def logs_of(self, card: Card) -> Path:
        """Logs of this identity's workers: another run, or another identity in this one, must not be sent them.

        Those of the identity before this one are kept, older ones go.
        """
        all_logs = self.folder / "logs"
        mine = all_logs / f"{card.identity.node}-{card.fingerprint[:8]}"
        mine.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = sorted((path for path in all_logs.iterdir() if path.is_dir() and path != mine), key=_changed_s)
        for old in others[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        return mine

    def own(self) -> Ownership:
        """Be the one agent with this folder.

        Raises:
            FleetError: another one has it.
        """
        return own(self.folder, "agent", remedy="Stop that one, or give another --state-dir.")

    def read(self) -> Card | None:
        """The card; None if there is none.

        Raises:
            FleetError: it cannot be read.
        """
        path = self.folder / _FILE
        if not path.exists():
            return None
        try:
            card = Card.model_validate_json(path.read_bytes())
            if fingerprint(card.certificate_pem) != card.fingerprint:
                raise ValueError("the certificate is not that of the fingerprint")
        except (OSError, ValueError, FleetError) as error:  # a ValidationError is a ValueError
            raise FleetError(f"{path} is damaged. Remove it, and join again with a new token.") from error
        return card.model_copy(update={"certificate_pem": alone(card.certificate_pem)})

    def write(self, card: Card) -> None:
        """Keep the card, whole or not at all."""
        write_private(self.folder / _FILE, card.model_dump_json().encode())

    def forget(self) -> None:
        """The identity is void."""
        (self.folder / _FILE).unlink(missing_ok=True)


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime
