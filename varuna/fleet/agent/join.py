"""Admission of a machine to a run: the certificate is compared with the JOIN string, then the token is spent."""

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from varuna.core.errors import FleetError
from varuna.core.version import __version__
from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
from varuna.fleet.net.client import ManagerRemote, UnreachableError, VoidSecretError, fetch_certificate, reason
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.net.protocol import Identity, JobIdentity, Joined, JoinRequest
from varuna.fleet.run_folder.registry import hashed

_JOIN_PATIENCE_S = 600.0
PAUSE_S = 2.0


def admit(invitation: JoinString, home: AgentFolder) -> AgentIdentity:
    """The card of this agent: the one it has, if it joined this run before, else a new one.

    Raises:
        UnreachableError: nobody answers; trying again may help.
        FleetError: the manager is another one, or refuses.
    """
    card = home.read()
    if card is not None and card.fingerprint == invitation.fingerprint:
        return card
    certificate_pem = fetch_certificate(invitation)
    attempt = home.attempt(hashed(invitation.token), invitation.fingerprint)
    request = JoinRequest(
        token=invitation.token,
        version=__version__,
        hostname=socket.gethostname()[:255],
        secret_sha256=hashed(attempt.secret),
    )
    answer = ManagerRemote(invitation.host, invitation.port, certificate_pem).post("/join", request.model_dump())
    if answer.status != 201:
        raise FleetError(f"the manager at {invitation.address} refused to let this machine join: {reason(answer.body)}")
    try:
        identity = Identity(node=Joined.model_validate_json(answer.body).node, secret=attempt.secret)
    except ValidationError as error:
        raise FleetError(
            f"the manager at {invitation.address} sent an answer that this version does not understand: {error}"
        ) from error
    card = AgentIdentity(
        identity=identity,
        certificate_pem=certificate_pem,
        fingerprint=invitation.fingerprint,
        token_sha256=attempt.token_sha256,
    )
    home.write(card)
    return card


def serve_as_agent(
    invited: Callable[[], JoinString],
    home: AgentFolder,
    run: Callable[[AgentIdentity], int],
    tell: Callable[[str], None],
    pause_s: float = PAUSE_S,
) -> int:
    """Be an agent; one whose secret is void joins once more, if its JOIN string has a token that it has not used.

    Args:
        invited: gives the JOIN string, which may change while nobody answers.
        home: its folder.
        run: with a card, to the end; returns the exit code.
        tell: shows a line.
        pause_s: before another try, where nobody answers.

    Raises:
        UnreachableError: nobody answers for ten minutes.
        FleetError: the manager refuses it.
    """
    card = _admit_patiently(invited, home, tell, pause_s)
    try:
        return run(card)
    except VoidSecretError as error:
        if card.token_sha256 == hashed(invited().token):
            raise
        tell(f"{error}. Joining again, because this JOIN string has an unused token.")
    home.forget()
    return run(_admit_patiently(invited, home, tell, pause_s))


def _admit_patiently(
    invited: Callable[[], JoinString], home: AgentFolder, tell: Callable[[str], None], pause_s: float
) -> AgentIdentity:
    deadline_s = time.monotonic() + _JOIN_PATIENCE_S
    while True:
        try:
            return admit(invited(), home)
        except UnreachableError as error:
            if time.monotonic() > deadline_s:
                raise
            tell(f"{error} Trying again.")
            time.sleep(pause_s)


def job_identity(script: Path, args: Sequence[str]) -> JobIdentity:
    """Return what all agents of a run must have in common.

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
