"""An S3 server (moto) that misbehaves while a file in a folder asks for it.

    python -m benchmarks.lying_bucket PORT FOLDER

``forgets``: every second upload is confirmed and dropped. ``changes``: one byte of each downloaded object is wrong.
``busy``: every second request is answered with 503.
"""

import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.wrappers import Response

Answer = Callable[..., Any]


class LyingBucket:
    """An application in front of another one."""

    def __init__(self, honest: Callable[[dict[str, Any], Answer], Iterable[bytes]], folder: Path) -> None:
        self._honest, self._folder, self._turns = honest, folder, itertools.count()

    def __call__(self, environ: dict[str, Any], start_response: Answer) -> Iterable[bytes]:
        """Answer a request, one way or the other."""
        is_object = environ["PATH_INFO"].count("/") > 1 and not environ["QUERY_STRING"]
        method, is_second = environ["REQUEST_METHOD"], next(self._turns) % 2 == 1
        if is_second and self._told("busy"):
            return Response("<Error><Code>SlowDown</Code></Error>", 503, mimetype="text/xml")(environ, start_response)
        if is_second and is_object and method == "PUT" and self._told("forgets"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return Response("", 200, {"ETag": '"0123456789abcdef0123456789abcdef"'})(environ, start_response)
        if is_object and method == "GET" and self._told("changes"):
            return [_changed(b"".join(self._honest(environ, start_response)))]
        return self._honest(environ, start_response)

    def _told(self, what: str) -> bool:
        return (self._folder / what).exists()


def _changed(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes(byte ^ 1 for byte in body[middle : middle + 1]) + body[middle + 1 :]


if __name__ == "__main__":
    bucket = LyingBucket(DomainDispatcherApplication(create_backend_app), Path(sys.argv[2]))
    run_simple("0.0.0.0", int(sys.argv[1]), bucket, threaded=True)
