"""A cloud's REST API: JSON over HTTPS with a bearer token, to one host only."""

import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from varuna.core.errors import FleetError, UsageError
from varuna.fleet.engines.provider import CapacityError
from varuna.fleet.net.bounded_http import HttpRequest, NoAnswerError, fetch

TIMEOUT_S = 10.0
LARGEST_BYTES = 1 << 24
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Bearer:
    """A token that the cloud's own library gets and renews.

    Args:
        cloud: its name.
        get: returns the token that is valid now; may raise anything.
        remedy: what to do if there never was one.
    """

    def __init__(self, cloud: str, get: Callable[[], str], remedy: str) -> None:
        self._cloud, self._get, self._remedy = cloud, get, remedy
        self._worked = False

    def token(self) -> str:
        """Return the token.

        Raises:
            CapacityError: it cannot be renewed now.
            FleetError: there is none.
        """
        try:
            token = self._get()
        except Exception as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            if self._worked:
                raise CapacityError(f"credentials of {self._cloud} cannot be renewed now: {first}") from error
            raise FleetError(f"there are no credentials of {self._cloud}: {first} {self._remedy}") from error
        self._worked = True
        return token


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """An answer of the API."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: dict[str, Any]
    """Of the body; empty if it has none."""

    @property
    def is_ok(self) -> bool:
        """Whether it did as it was asked."""
        return 200 <= self.status < 300


class Rest:
    """Calls one API.

    Args:
        cloud: its name, for errors.
        url: of the API: https, or http on loopback, since a token travels with each call.
        token: valid now; empty: none is needed.
        tls: trusts whom; None: the system's authorities.
        timeout_s: for a whole answer.
        largest_bytes: of a body; an answer with more is none.

    Raises:
        UsageError: the address is neither.
    """

    def __init__(
        self,
        cloud: str,
        url: str,
        token: Callable[[], str],
        tls: ssl.SSLContext | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        largest_bytes: int = LARGEST_BYTES,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise UsageError(f"the address of {cloud}'s API must begin with https://, but it is {url!r}")
        self._cloud, self.url, self._token, self._tls = cloud, url.rstrip("/"), token, tls
        self._timeout_s, self._largest_bytes = timeout_s, largest_bytes

    def request(self, method: str, path: str, content: object = None, kind: str = "application/json") -> HttpRequest:
        """Build the request that ``send`` would send, without the token.

        Args:
            method: of the request.
            path: from the API's root, or a whole address that the API itself gave.
            content: of the body.
            kind: of the body.
        """
        body = None if content is None else json.dumps(content)
        headers = {} if body is None else {"Content-Type": kind}
        return HttpRequest(method, path if "://" in path else self.url + path, headers, body)

    def send(self, request: HttpRequest) -> RestAnswer:
        """Send the request.

        Raises:
            CapacityError: no answer, or none that can be understood.
            FleetError: there are no credentials.
        """
        if urlsplit(request.url)[:2] != urlsplit(self.url)[:2]:
            raise CapacityError(f"{self._cloud} points to another host, which gets no token: {request.url[:200]}")
        token = self._token()
        headers = {**request.headers, "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            answer = fetch(
                request._replace(headers=headers),
                timeout_s=self._timeout_s,
                largest_bytes=self._largest_bytes,
                tls=self._tls,
                through_proxy=True,
            )
            content = json.loads(answer.body) if answer.body.strip() else {}
        except (NoAnswerError, ValueError, RecursionError) as error:
            raise CapacityError(f"{self._cloud} did not answer: {error}") from error
        if not isinstance(content, dict):
            raise CapacityError(f"{self._cloud} did not answer: its JSON is not an object")
        return RestAnswer(answer.status, answer.headers, content)

    def get(self, path: str) -> RestAnswer:
        """Read; errors as of ``send``."""
        return self.send(self.request("GET", path))
