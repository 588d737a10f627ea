"""The identity of this Varuna: two that do not understand each other are told apart, also under one version number."""

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from websockets.http11 import Response

from varuna.core.errors import FleetError
from varuna.core.version import __version__

SOURCE_HEADER = "x-varuna-source"
_PACKAGE = Path(__file__).parents[2]


@cache
def source() -> str:
    """The version, and a digest of the package's files: ``0.1.0+3f2a91bc``."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        with suppress(OSError):  # another installation is under way, which is another digest in any case
            digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:8]}"


def other_source(manager: str, agent: str) -> str:
    """Say what to do where manager and agent are not the same Varuna; empty if they are, or one does not say.

    The text is short enough for the reason with which a WebSocket is closed.
    """
    if not (manager and agent) or manager == agent:
        return ""
    return f"the manager is Varuna {manager[:24]}, this agent {agent[:24]}: install the same one on both"


def check_same(answer: Response | None, place: str) -> None:
    """See that the manager at ``place``, which does not understand this agent, is not another Varuna.

    Raises:
        FleetError: it is.
    """
    theirs = answer.headers.get(SOURCE_HEADER, "") if answer is not None else ""
    if why := other_source(theirs, source()):
        raise FleetError(f"{why} ({place})")
