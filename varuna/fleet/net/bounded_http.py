"""One HTTP request that ends: bounded in time and size, and never redirected."""

import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


class NoAnswerError(Exception):
    """The other end is not there, too slow, or says what cannot be understood."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: str


class HttpRequest(NamedTuple):
    """An HTTP request; prints as the line that ``--dry-run`` shows."""

    method: str
    url: str
    headers: Mapping[str, str] = {}
    body: str | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.url}" + (f" {self.body}" if self.body else "")


def fetch(
    request: HttpRequest,
    *,
    timeout_s: float,
    largest_bytes: int,
    tls: ssl.SSLContext | None = None,
    through_proxy: bool = False,
) -> Answer:
    """Ask once.

    Args:
        request: what.
        timeout_s: for connecting, and for the whole answer after that.
        largest_bytes: of the answer's body.
        tls: trusts whom; None: the system's authorities.
        through_proxy: heed ``HTTPS_PROXY`` and ``NO_PROXY``.

    Raises:
        NoAnswerError: nobody answers, not the whole answer comes in time, or it is too large or no text.
    """
    try:
        connection = _connection(request.url, timeout_s, tls, through_proxy)
        connection.connect()
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error
    # The connection's own timeout starts anew with each byte that trickles in.
    deadline = threading.Timer(timeout_s, _cut, [connection.sock])
    deadline.daemon = True
    deadline.start()
    parts = urlsplit(request.url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(request.method, target, request.body, dict(request.headers))
        return _read(connection.getresponse(), largest_bytes)
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error
    finally:
        deadline.cancel()
        connection.close()


def _connection(url: str, timeout_s: float, tls: ssl.SSLContext | None, through_proxy: bool) -> HTTPConnection:
    """Not connected yet.

    Raises:
        ValueError: the address is not one of http or https.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http address")
    if parts.scheme == "http":
        return HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    context = tls or ssl.create_default_context()
    proxy = urlsplit(getproxies().get("https", "")) if through_proxy and not proxy_bypass(parts.hostname) else None
    if proxy is None or not proxy.hostname:
        return HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    tunnelled = HTTPSConnection(proxy.hostname, proxy.port, timeout=timeout_s, context=context)
    tunnelled.set_tunnel(parts.hostname, parts.port or 443)
    return tunnelled


def _cut(connection: socket.socket) -> None:
    """End a connection under whoever reads from it."""
    with suppress(OSError):
        # Of the socket itself: TLS would wait for its own goodbye.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _read(answer: HTTPResponse, largest_bytes: int) -> Answer:
    headers = {name.lower(): text for name, text in answer.getheaders()}
    body = answer.read(largest_bytes + 1)
    if len(body) > largest_bytes:
        raise NoAnswerError(f"an answer of more than {largest_bytes} bytes")
    if answer.length:
        raise NoAnswerError(f"{answer.length} bytes of the answer are missing")
    return Answer(answer.status, headers, body.decode("utf-8"))
