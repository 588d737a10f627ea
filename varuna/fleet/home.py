"""An agent's folder: who it is, across restarts, and its workers' logs."""

from pathlib import Path

from pydantic import Field

from varuna.core.errors import FleetError
from varuna.core.value import Value
from varuna.fleet.authority import alone, fingerprint, write_private
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
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

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
