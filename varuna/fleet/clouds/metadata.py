"""One question to a cloud's metadata service: over plain HTTP, without a proxy, bounded in time and size."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

METADATA_URL = "http://169.254.169.254"
"""The same link-local address on AWS, Azure and Google Cloud."""
_TIMEOUT_S = 2.0
_LARGEST_BYTES = 1 << 16


class NoAnswerError(Exception):
    """The service is not there, is too slow, or says what it never would."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: str


class MetadataService:
    """The service at one address.

    Args:
        url: such as ``http://169.254.169.254``; anything but http is never answered.
    """

    def __init__(self, url: str = METADATA_URL) -> None:
        self._url = url

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: str | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Answer:
        """Ask once.

        Args:
            path: of the resource, from the root.
            headers: that this cloud demands.
            method: of the request.
            body: of the request.
            timeout_s: for connecting, and for the whole answer after that.

        Raises:
            NoAnswerError: no service, no whole answer in time, one of more than 64 KiB, or a web page.
        """
        try:
            parts = urlsplit(self._url)
            if parts.scheme != "http" or not parts.hostname:
                raise NoAnswerError(f"{self._url!r} is not an http address")
            connection = HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
            connection.connect()
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        # The connection's own timeout starts anew with each byte that trickles in.
        deadline = threading.Timer(timeout_s, _cut, [connection.sock])
        deadline.daemon = True
        deadline.start()
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, dict(headers))
            return _read(connection.getresponse())
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        finally:
            deadline.cancel()
            connection.close()


def _cut(connection: socket.socket) -> None:
    """End a connection under whoever reads from it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read(answer: HTTPResponse) -> Answer:
    headers = {name.lower(): text for name, text in answer.getheaders()}
    if headers.get("content-type", "").startswith("text/html"):
        raise NoAnswerError("a web page: this is not a metadata service")
    body = answer.read(_LARGEST_BYTES + 1)
    if len(body) > _LARGEST_BYTES:
        raise NoAnswerError(f"an answer of more than {_LARGEST_BYTES} bytes")
    if answer.length:
        raise NoAnswerError(f"{answer.length} bytes of the answer are missing")
    return Answer(answer.status, headers, body.decode("utf-8"))
