"""Real object stores on this machine, and a proxy in front of them that cuts, freezes and refuses."""

import base64
import contextlib
import datetime
import hashlib
import hmac
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.waiting import wait_for

AZURITE = Path(__file__).parent.parent.parent / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
ACCOUNT = "devstoreaccount1"  # Azurite's own, with its published key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_START_S = 30


class Proxy:
    """Forwards connections to a port as long as ``mode`` says so.

    ``pass``: both ways. ``refuse``: connections are closed at once, as those that exist were. ``freeze``: nothing
    moves. ``deaf``: requests reach the server, its answers get lost. ``deaf once``: the next answer does.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._moving = threading.Event()
        self._moving.set()
        self.mode = "pass"
        self.sent_bytes = self.disturbed = 0
        """disturbed: how often somebody was refused, held up, or left without an answer"""
        self._to_lose: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        """Change what happens, to connections that exist too."""
        self.mode = mode
        (self._moving.clear if mode == "freeze" else self._moving.set)()
        if mode == "refuse":
            for each in list(self._sockets):
                _close(each)

    def disturb(self, mode: str, times: int = 1) -> None:
        """Let something else happen, and wait until it has so often."""
        before = self.disturbed
        self.set(mode)
        wait_for(lambda: self.disturbed >= before + times)

    def lose_answer_to(self, text: bytes) -> None:
        """The answer to the next request that contains ``text`` gets lost, after the server has done what it asks."""
        self._to_lose = text

    def close(self) -> None:
        self.set("refuse")
        _close(self._listener)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse":
                self.disturbed += 1
                _close(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets |= {client, server}
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.disturbed += not self._moving.is_set()
                self._moving.wait()
                if is_answer and self.mode in ("deaf", "deaf once"):
                    self.mode = "pass" if self.mode == "deaf once" else self.mode
                    self.disturbed += 1
                    break
                if not is_answer:
                    self.sent_bytes += len(data)
                    if self._to_lose is not None and self._to_lose in data:
                        self._to_lose, self.mode = None, "deaf once"
                sink.sendall(data)
        for each in (source, sink):
            self._sockets.discard(each)
            _close(each)


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


class Server(NamedTuple):
    """A store's server behind its proxy, and what a process needs in its environment to find it."""

    name: str
    place: str
    proxy: Proxy
    environment: Mapping[str, str]


@contextmanager
def moto() -> Iterator[Server]:
    """S3, as moto serves it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    proxy = Proxy(port)
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    try:
        s3 = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        s3.create_bucket(Bucket="runs")
        s3.close()
        yield Server("s3", "s3://runs", proxy, environment)
    finally:
        proxy.close()
        server.stop()


def why_no_azurite() -> str:
    """Say why Azurite cannot be started; empty if it can."""
    if shutil.which("node") is None:
        return "there is no node to run Azurite"
    return "" if AZURITE.exists() else f"{AZURITE} is missing: `make azurite` installs it where there is npm"


@contextmanager
def azurite() -> Iterator[Server]:
    """Azure Blob, as Azurite serves it."""
    port = free_port()
    options = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    process = subprocess.Popen(
        [str(AZURITE), *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(_START_S, process.kill)
    watchdog.start()
    proxy = Proxy(port)
    try:
        for line in process.stdout:
            if "successfully listens" in line:
                break
        watchdog.cancel()
        _create_container(port, "runs")
        yield Server(
            "azure",
            "az://runs",
            proxy,
            {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{proxy.port}/{ACCOUNT}",
                "AZURE_ALLOW_HTTP": "true",
            },
        )
    finally:
        watchdog.cancel()
        proxy.close()
        process.kill()
        process.wait(10)
        process.stdout.close()


def _create_container(port: int, name: str) -> None:
    """Azure's REST call, signed by hand."""
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
    digest = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"},
    )
    urllib.request.urlopen(request, timeout=10).close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
