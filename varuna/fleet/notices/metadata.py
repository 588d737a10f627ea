"""One question to a cloud's metadata service: plain HTTP, no proxy, a small answer."""

from collections.abc import Mapping

from varuna.fleet.net.bounded_http import Answer, HttpRequest, NoAnswerError, fetch

METADATA_URL = "http://169.254.169.254"
"""The same link-local address on AWS, Azure and Google Cloud."""
_TIMEOUT_S = 2.0
_LARGEST_BYTES = 1 << 16


class MetadataService:
    """The service at one address.

    Args:
        url: such as ``http://169.254.169.254``; anything but http is never answered.
    """

    def __init__(self, url: str = METADATA_URL) -> None:
        self._url = url.rstrip("/")

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
        if not self._url.startswith("http://"):
            raise NoAnswerError(f"{self._url!r} is not an http address")
        request = HttpRequest(method, self._url + path, headers, body)
        answer = fetch(request, timeout_s=timeout_s, largest_bytes=_LARGEST_BYTES)
        if answer.headers.get("content-type", "").startswith("text/html"):
            raise NoAnswerError("a web page: this is not a metadata service")
        return answer
