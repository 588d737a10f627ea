"""How a machine becomes part of a run: the certificate is compared with the JOIN string, then the token is spent."""

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from varuna import __version__
from varuna.core.errors import FleetError
from varuna.fleet.home import Card, Home
from varuna.fleet.invitation import Invitation
from varuna.fleet.protocol import Identity, JobIdentity, JoinRequest
from varuna.fleet.remote import Remote, fetch_certificate, reason


def admit(invitation: Invitation, home: Home) -> Card:
    """The card of this agent: the one it has, if it joined this run before, else a new one.

    Raises:
        UnreachableError: nobody answers; trying again may help.
        FleetError: the manager is another one, or refuses.
    """
    card = home.read()
    if card is not None and card.fingerprint == invitation.fingerprint:
        return card
    certificate_pem = fetch_certificate(invitation)
    request = JoinRequest(token=invitation.token, version=__version__, hostname=socket.gethostname()[:255])
    answer = Remote(invitation.host, invitation.port, certificate_pem).post("/join", request.model_dump())
    if answer.status != 201:
        raise FleetError(f"the manager at {invitation.address} refused to let this machine join: {reason(answer.body)}")
    try:
        identity = Identity.model_validate_json(answer.body)
    except ValidationError as error:
        raise FleetError(f"the manager at {invitation.address} answered something unknown: {error}") from error
    card = Card(identity=identity, certificate_pem=certificate_pem, fingerprint=invitation.fingerprint)
    home.write(card)
    return card


def job_identity(script: Path, args: Sequence[str]) -> JobIdentity:
    """What all agents of a run must have in common.

    Raises:
        FleetError: the script cannot be read.
    """
    try:
        content = script.read_bytes()
    except OSError as error:
        raise FleetError(f"cannot read the script {script}: {error.strerror}") from error
    return JobIdentity(
        version=__version__,
        script=script.name,
        script_sha256=hashlib.sha256(content).hexdigest(),
        args_sha256=hashlib.sha256("\0".join(args).encode(errors="surrogateescape")).hexdigest(),
    )
