"""AWS spot notices: the instance metadata service says two minutes ahead when a VM will be taken back."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

METADATA_URL = "http://169.254.169.254"
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Names another address of the service, for us as for AWS's own tools."""
_EVERY_S = 5.0  # as AWS recommends
_TOKEN_TTL_S = 21600
_TIMEOUT_S = 2.0
_LARGEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """This VM will be taken back."""

    action: str
    """terminate, stop or hibernate."""
    in_s: float
    """Seconds from now; 0 if the time has passed."""


class SpotNotices:
    """Polls IMDSv2 ``spot/instance-action`` on a thread, until the notice comes or it is closed.

    On a machine without the service nothing happens. The link-local address is asked without any proxy.

    Args:
        on_notice: gets the notice, once, on the poller's thread.
        url: of the service; by default what the environment says, else the link-local address.
        every_s: between two questions.
        now: the wall clock, with which AWS writes the time.
    """

    def __init__(
        self,
        on_notice: Callable[[SpotNotice], None],
        *,
        url: str = "",
        every_s: float = _EVERY_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._on_notice, self._every_s, self._now = on_notice, every_s, now
        self._url = (url or os.environ.get(ENDPOINT_VARIABLE) or METADATA_URL).rstrip("/")
        self._open = build_opener(ProxyHandler({})).open
        self._token = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="varuna-spot-notices", daemon=True)

    def start(self) -> None:
        """Poll from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop; returns once the thread is gone, or at most after the service's timeouts."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(3 * _TIMEOUT_S)

    def poll(self) -> SpotNotice | None:
        """Ask once; None if there is no notice, or no such service."""
        try:
            return self._ask()
        except (HTTPError, URLError, HTTPException, OSError, ValueError, KeyError, TypeError):
            return None  # no service here, or it hiccups: the next poll asks again

    def _run(self) -> None:
        while not self._closed.is_set():
            notice = self.poll()
            if notice is not None:
                self._on_notice(notice)
                return
            self._closed.wait(self._every_s)

    def _ask(self) -> SpotNotice | None:
        """IMDSv2: a session token first; it expires, and then the service answers 401."""
        for _ in range(2):
            if not self._token:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
                self._token = self._fetch(Request(f"{self._url}/latest/api/token", method="PUT", headers=ttl))
            headers = {"X-aws-ec2-metadata-token": self._token}
            try:
                body = self._fetch(Request(f"{self._url}/latest/meta-data/spot/instance-action", headers=headers))
            except HTTPError as error:
                if error.code != 401:
                    return None  # 404: nothing is planned
                self._token = ""
                continue
            return self._read(body)
        return None

    def _fetch(self, request: Request) -> str:
        with self._open(request, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read(_LARGEST_BYTES)
        return body.decode("ascii")

    def _read(self, body: str) -> SpotNotice:
        """``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``."""
        content = json.loads(body)
        moment = datetime.fromisoformat(content["time"])
        at_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        return SpotNotice(str(content["action"]), max(0.0, at_s - self._now()))
