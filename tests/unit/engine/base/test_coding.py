"""Bodies that wait for the line, as a real socket shows whose other end reads nothing."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from varuna.engine.base.coding import LARGE_BYTES, Coding

BODY_BYTES = 4 * LARGE_BYTES
HELD_BYTES = 8192
"""By the end that reads nothing, about; all that is written beyond stays in the socket."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what a socket holds")


@pytest.fixture
def narrow() -> Iterator[socket.socket]:
    """A connected socket that takes much, to one that takes little."""
    with closing(socket.socket()) as listening, closing(socket.socket()) as writes:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        writes.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * LARGE_BYTES)
        writes.connect(listening.getsockname())
        with closing(listening.accept()[0]):
            yield writes


@pytest.mark.parametrize(
    ("waiting_bytes", "encodes"), [pytest.param(LARGE_BYTES // 2, False, id="small"), (2 * LARGE_BYTES, True)]
)
def test_only_a_socket_that_holds_much_of_what_was_written_makes_a_body_wait(
    narrow: socket.socket, waiting_bytes: int, *, encodes: bool
) -> None:
    """A vote's frame, just sent, does not tell that the line was busy while the step computed."""
    narrow.sendall(bytes(waiting_bytes + 4 * HELD_BYTES))
    coding = Coding(narrow)
    for _ in range(6):
        coding.begin(BODY_BYTES)
        time.sleep(0.06)  # a window is not full before
        coding.end(BODY_BYTES, BODY_BYTES, is_encoded=False)
    assert coding.encodes == encodes
