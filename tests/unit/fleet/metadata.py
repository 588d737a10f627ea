"""Local servers that speak as much of the clouds' metadata services as notices need, truthfully or not."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit


class Service(BaseHTTPRequestHandler):
    """Answers; subclasses say what."""

    server: "Server"

    def say(self, code: int, body: str | bytes, kind: str = "text/plain", **headers: str) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Says nothing of clients that hang up."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server on loopback."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Metadata(Service):
    """AWS. Refuses IMDSv1, forgets tokens when told to, and has a notice and advice or not."""

    token: ClassVar[str] = "t0"
    action: ClassVar[str | None] = None
    rebalance: ClassVar[str | None] = None
    life_cycle: ClassVar[str | None] = None
    zone: ClassVar[str | None] = None
    tokens_given: ClassVar[int] = 0

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        if self.path != "/latest/api/token" or not ttl:
            self.say(400, "")
        else:
            type(self).tokens_given += 1
            self.say(200, self.token)

    def do_GET(self) -> None:
        found = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
            "/latest/meta-data/instance-life-cycle": self.life_cycle,
            "/latest/meta-data/placement/region": self.zone and self.zone[:-1],
            "/latest/meta-data/placement/availability-zone": self.zone,
        }.get(self.path)
        if self.headers.get("X-aws-ec2-metadata-token") != self.token:
            self.say(401, "Unauthorized")
        elif found is None:
            self.say(404, "Not Found")
        else:
            self.say(200, found)


@contextmanager
def metadata_service() -> Iterator[str]:
    """AWS's URL; what it answers is set on ``Metadata``."""
    Metadata.token, Metadata.action, Metadata.rebalance, Metadata.tokens_given = "t0", None, None, 0
    Metadata.life_cycle = Metadata.zone = None
    with serving(Metadata) as url:
        yield url


class AzureMetadata(Service):
    """Azure: the name of this VM, its scheduled events, and what was approved."""

    events: ClassVar[list[dict[str, object]]] = []
    approved: ClassVar[list[str]] = []
    priority: ClassVar[str] = "Regular"
    zone: ClassVar[str] = ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked = parse_qs(parts.query)
        if self.headers.get("Metadata") != "true" or "api-version" not in asked:
            self.say(400, json.dumps({"error": "Bad request"}), "application/json")
        elif parts.path == "/metadata/instance/compute/name":
            self.say(200, "trainers_3", "text/plain; charset=utf-8")
        elif parts.path == "/metadata/instance/compute/priority":
            self.say(200, self.priority, "text/plain; charset=utf-8")
        elif parts.path == "/metadata/instance/compute/location":
            self.say(200, "westeurope", "text/plain; charset=utf-8")
        elif parts.path == "/metadata/instance/compute/zone":
            self.say(200, self.zone, "text/plain; charset=utf-8")
        elif parts.path == "/metadata/scheduledevents":
            self.say(200, json.dumps({"DocumentIncarnation": 2, "Events": self.events}), "application/json")
        else:
            self.say(404, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = {event["EventId"] for event in self.events}
        asked = [one["EventId"] for one in body["StartRequests"]]
        if self.headers.get("Metadata") != "true" or not set(asked) <= known:
            self.say(400, "")
        else:
            type(self).approved = [*self.approved, *asked]
            self.say(200, "")


class GoogleMetadata(Service):
    """Google Cloud: holds a question until something changes, as ``wait_for_change`` says."""

    preempted: ClassVar[str] = "FALSE"
    maintenance: ClassVar[str] = "NONE"
    preemptible: ClassVar[str] = "FALSE"
    zone: ClassVar[str] = "projects/123/zones/us-central1-a"
    changed: ClassVar[threading.Event] = threading.Event()
    held: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked = {name: found[0] for name, found in parse_qs(parts.query).items()}
        if self.headers.get("Metadata-Flavor") != "Google":
            self.say(403, "Missing Metadata-Flavor:Google header.")
            return
        if asked.get("wait_for_change") == "true" and asked.get("last_etag") == f"tag-{self.preempted}":
            self.held.set()
            self.changed.wait(float(asked["timeout_sec"]))
        found = {
            "/computeMetadata/v1/instance/preempted": self.preempted,
            "/computeMetadata/v1/instance/maintenance-event": self.maintenance,
            "/computeMetadata/v1/instance/scheduling/preemptible": self.preemptible,
            "/computeMetadata/v1/instance/zone": self.zone,
        }.get(parts.path)
        if found is None:
            self.say(404, "", Metadata_Flavor="Google")
        else:
            self.say(200, found, "application/text", Metadata_Flavor="Google", ETag=f"tag-{found}")


def lying(answer: Callable[[Service], None]) -> type[Service]:
    """A service that answers everything the same way."""

    class Liar(Service):
        def do_GET(self) -> None:
            answer(self)

        do_PUT = do_POST = do_GET

    return Liar


def _trickle(service: Service) -> None:
    """One byte after the other, for as long as somebody listens."""
    service.send_response(200)
    service.send_header("Content-Length", "100000")
    service.end_headers()
    for _ in range(1000):
        service.wfile.write(b"x")
        time.sleep(0.02)


def _half(service: Service) -> None:
    service.send_response(200)
    service.send_header("Content-Length", "1000")
    service.end_headers()
    service.wfile.write(b"TRUE")
    service.close_connection = True


LIES: dict[str, Callable[[Service], None]] = {
    "a web page": lambda service: service.say(200, "<html>Sign in to this network</html>", "text/html"),
    "one word": lambda service: service.say(200, "maybe"),
    "bytes": lambda service: service.say(200, b"\xff\xfe\x00" * 9),
    "an error": lambda service: service.say(500, "oops"),
    "a mebibyte": lambda service: service.say(200, "x" * 2**20, Metadata_Flavor="Google"),
    "half an answer": _half,
    "a byte at a time": _trickle,
    "no protocol": lambda service: service.connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
}
