"""A manager seen from outside: requests over pinned TLS (or plain HTTP on loopback), with errors for people."""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass

from varuna.core.errors import FleetError
from varuna.fleet.net.ca import SERVER_NAME, alone, client_context, fingerprint, unverified_context
from varuna.fleet.net.join_string import JoinString

_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 * 2**20
_WHOLE_ANSWER_S = 60.0
_PART_BYTES = 2**18


class UnreachableError(FleetError):
    """The other end does not answer; trying again later may help."""


class VoidSecretError(FleetError):
    """A machine that joined before is not let in any more; another token may help."""


@dataclass(frozen=True)
class ManagerReply:
    """A manager's reply to a request."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class _PinnedConnection(http.client.HTTPSConnection):
    """Connects to an address, but asks TLS for the fixed name; one bound for all of it."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, verifies: bool) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S, context=context)
        self._tls, self._name = context, SERVER_NAME if verifies else None

    def connect(self) -> None:
        raw = socket.create_connection((self.host, self.port), self.timeout)
        try:
            self.sock = self._tls.wrap_socket(raw, server_hostname=self._name)
        except BaseException:
            raw.close()
            raise


@dataclass(frozen=True)
class ManagerRemote:
    """A manager's address, and the means to recognise it.

    Args:
        host: name or address.
        port: its port.
        certificate_pem: of the run's authority; None for plain HTTP on loopback.
        token: the operator's.
        answer_s: bound on a whole answer.
    """

    host: str
    port: int
    certificate_pem: str | None
    token: str = ""
    answer_s: float = _WHOLE_ANSWER_S

    def get(self, path: str) -> ManagerReply:
        """Read ``path``.

        Raises:
            FleetError: nobody answers, or somebody else.
        """
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> ManagerReply:
        """Post to ``path``, to change something.

        Raises:
            FleetError: nobody answers, or somebody else.
        """
        return self._request("POST", path, json.dumps(body).encode())

    def _request(self, method: str, path: str, body: bytes | None) -> ManagerReply:
        if self.certificate_pem is None:
            connection: http.client.HTTPConnection = http.client.HTTPConnection(
                self.host, self.port, timeout=_TIMEOUT_S
            )
        else:
            connection = _PinnedConnection(self.host, self.port, client_context(self.certificate_pem), True)
        return _exchange(connection, method, path, body, self.token, self.answer_s)


def fetch_certificate(invitation: JoinString) -> str:
    """The CA certificate of an invitation (PEM); what has another fingerprint is thrown away.

    Raises:
        UnreachableError: nobody answers.
        FleetError: somebody else does.
    """
    connection = _PinnedConnection(invitation.host, invitation.port, unverified_context(), False)
    answer = _exchange(connection, "GET", "/ca", None, "", _WHOLE_ANSWER_S)
    if answer.status != 200:
        raise FleetError(
            f"{invitation.address} is not a Varuna manager: it answered {answer.status} when asked for its "
            "certificate. Check the address in the JOIN string."
        )
    pem = answer.body.decode(errors="replace")
    found = fingerprint(pem)
    if found != invitation.fingerprint:
        raise FleetError(
            f"the manager at {invitation.address} is not the one that this JOIN string was made for: its "
            f"certificate has fingerprint {found[:16]}..., expected {invitation.fingerprint[:16]}... Get a new "
            "JOIN string from the right manager. If you did, someone in between is impersonating it."
        )
    return alone(pem)


def _exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, token: str, answer_s: float
) -> ManagerReply:
    where = f"{connection.host}:{connection.port}"
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return ManagerReply(answer.status, _body(answer, answer_s), {k.lower(): v for k, v in answer.getheaders()})
    except (OSError, http.client.HTTPException) as error:
        raise explain(error, where) from error
    finally:
        connection.close()


def _body(answer: http.client.HTTPResponse, bound_s: float) -> bytes:
    """All of it, within a bound of bytes and one of time: each read has its own, and a drop now and then satisfies it.

    Raises:
        TimeoutError: it took too long.
    """
    body, deadline_s = bytearray(), time.monotonic() + bound_s
    while len(body) < _MAX_ANSWER_BYTES and (part := answer.read1(_PART_BYTES)):
        body += part
        if time.monotonic() > deadline_s:
            raise TimeoutError
    return bytes(body)


def explain(error: Exception, where: str) -> FleetError:
    """Say what went wrong between us and a manager, and what to do."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=10):
            return FleetError(
                f"the certificate of the manager at {where} has expired, or this machine's clock is wrong. Compare "
                "`date` here and there; restarting the manager renews its certificate."
            )
        case ssl.SSLCertVerificationError(verify_code=9):
            return FleetError(
                f"the certificate of the manager at {where} is not valid yet: this machine's clock is wrong. "
                "Correct it."
            )
        case ssl.SSLCertVerificationError():
            return FleetError(
                f"the server at {where} is not this run's manager (its certificate differs: "
                f"{error.verify_message}). Check the address."
            )
        case ssl.SSLError():
            return FleetError(
                f"{where} does not speak TLS 1.3 as a Varuna manager does ({error.reason or error}). Check host and "
                "port."
            )
        case http.client.RemoteDisconnected() | ConnectionResetError() | http.client.BadStatusLine():
            return FleetError(
                f"{where} closed the connection without an answer: it is not a Varuna manager, or it uses TLS and "
                "this side does not. Check the address."
            )
        case ConnectionRefusedError():
            return UnreachableError(f"no manager is listening at {where}. Is it running? Check the address.")
        case TimeoutError():
            return UnreachableError(
                f"{where} did not answer within {_TIMEOUT_S:.0f} s. Is the port open between the two machines?"
            )
        case socket.gaierror():
            return UnreachableError(f"the name in {where} cannot be resolved ({error.strerror}). Check the address.")
        case _:
            return UnreachableError(f"cannot reach a manager at {where}: {error}")


def reason(body: bytes) -> str:
    """The text of a refusal."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace") or "no reason given"
