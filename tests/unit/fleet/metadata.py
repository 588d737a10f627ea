"""A local server that speaks as much of IMDSv2 as spot notices need."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Metadata(BaseHTTPRequestHandler):
    """Refuses IMDSv1, forgets tokens when told to, and has a notice or not."""

    token: ClassVar[str] = "t0"
    action: ClassVar[str | None] = None
    tokens_given: ClassVar[int] = 0

    def do_PUT(self) -> None:
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        if self.path != "/latest/api/token" or not ttl:
            self._say(400, "")
        else:
            type(self).tokens_given += 1
            self._say(200, self.token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != self.token:
            self._say(401, "Unauthorized")
        elif self.path != "/latest/meta-data/spot/instance-action" or self.action is None:
            self._say(404, "Not Found")
        else:
            self._say(200, self.action)

    def _say(self, code: int, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def metadata_service() -> Iterator[str]:
    """Its URL; what it answers is set on ``Metadata``."""
    Metadata.token, Metadata.action, Metadata.tokens_given = "t0", None, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
