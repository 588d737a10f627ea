"""The string that one pastes to reach a manager: its address, its certificate's fingerprint, and a token."""

import re

from pydantic import Field

from varuna.core.errors import UsageError
from varuna.core.value import Value

SCHEME = "varuna://"
JOIN_VARIABLE = "VARUNA_JOIN"
"""In an agent's environment: the JOIN string. Its workers never get it."""
_FORM = re.compile(
    r"varuna://(?P<token>[A-Za-z0-9_-]{8,128})@(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})"
    r"/(?P<fingerprint>[0-9a-f]{64})"
)


class JoinString(Value):
    """``varuna://TOKEN@HOST:PORT/FINGERPRINT``; the fingerprint is the SHA-256 of the CA certificate."""

    host: str
    port: int = Field(ge=1, le=65535)
    fingerprint: str
    token: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{self.token}@{host}:{self.port}/{self.fingerprint}"

    @property
    def address(self) -> str:
        """``host:port``, to show to people."""
        return f"{self.host}:{self.port}"


def parse_invitation(text: str) -> JoinString:
    """Read what ``varuna manager`` or ``varuna join-token`` printed.

    Raises:
        UsageError: it is something else, or only a part.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None or not 1 <= int(found["port"]) <= 65535:
        shown = text if len(text) <= 16 else text[:16] + "..."
        raise UsageError(
            f"{shown!r} is not a JOIN string, which looks like varuna://TOKEN@HOST:PORT/FINGERPRINT. Copy the "
            "whole line that `varuna manager` or `varuna join-token` printed, in quotes."
        )
    return JoinString(
        host=found["host"].strip("[]"),
        port=int(found["port"]),
        fingerprint=found["fingerprint"],
        token=found["token"],
    )
