"""Strangers, over real sockets: they have few places and little time, and bring nothing to the terminal."""

import asyncio
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.depth import nightly
from tests.waiting import wait_for
from varuna.fleet.net import connection_limits
from varuna.fleet.net.ca import CertificateAuthority, open_authority
from varuna.fleet.net.client import ManagerRemote
from varuna.fleet.net.connection_limits import ConnectionLimits, origin_of, welcome
from varuna.fleet.net.requests import read_body
from varuna.fleet.net.serving import Serving

pytestmark = pytest.mark.timeout(20)
PATIENCE_S = 0.3
LARGE_BYTES = 2**24


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def take(request: Request) -> Response:
    return PlainTextResponse(str(len(await read_body(request, 100) or b"")))


async def fail(request: Request) -> Response:
    raise ZeroDivisionError


async def pour(request: Request) -> Response:
    return PlainTextResponse("x" * LARGE_BYTES)


async def linger(request: Request) -> Response:
    """For longer than a stranger may stay."""
    if request.headers.get("authorization") == "secret":
        welcome(request)
    await asyncio.sleep(2 * PATIENCE_S)
    return PlainTextResponse("done")


async def echo(websocket: WebSocket) -> None:
    if websocket.headers.get("authorization") == "secret":
        welcome(websocket)
    await websocket.accept()
    while True:
        await websocket.send_text(await websocket.receive_text())


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each address of this machine for another user."""
    monkeypatch.setattr(connection_limits, "user_of", lambda peer, own: int(peer[0].rpartition(".")[2]))


@pytest.fixture
def port() -> Iterator[int]:
    routes = [Route("/", hello), Route("/fail", fail), Route("/pour", pour), Route("/linger", linger)]
    routes.append(Route("/take", take, methods=["POST"]))
    limits = ConnectionLimits(most=8, most_of_one=4, request_s=PATIENCE_S)
    serving = Serving(port=0, max_frame_bytes=1000, limits=limits)
    serving.start(Starlette(routes=[*routes, WebSocketRoute("/echo", echo)]))
    yield serving.port
    serving.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return open_authority(tmp_path_factory.mktemp("authority"))


LOOPS = pytest.mark.parametrize(
    "loop",
    [None, pytest.param(asyncio.new_event_loop, marks=pytest.mark.nightly)],
    ids=["the fastest loop that is installed", "asyncio's own"],
)
Loop = Callable[[], asyncio.AbstractEventLoop]


@contextmanager
def secured(authority: CertificateAuthority, loop: Loop | None, request_s: float) -> Iterator[int]:
    """8 strangers at most, 4 from one address."""
    limits = ConnectionLimits(most=8, most_of_one=4, request_s=request_s)
    tls = authority.server_context()
    serving = Serving(port=0, max_frame_bytes=1000, tls=tls, limits=limits, loop_factory=loop)
    serving.start(Starlette(routes=[Route("/", hello)]))
    try:
        yield serving.port
    finally:
        serving.stop()


def get(port: int, path: str = "/", secret: str = "") -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path, headers={"Authorization": secret})
    body = connection.getresponse().read().decode()
    connection.close()
    return body


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nX: ", *nightly(b"", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")])
def test_who_brings_no_request_or_no_second_one_is_sent_away(port: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(said)
        heard = b""
        while data := _read(stranger):
            heard += data
    assert heard.endswith(b"hello") == said.endswith(b"\r\n\r\n")


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


def test_one_address_has_few_places_for_strangers_and_they_come_free_again(port: int) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(20)]
    try:
        refused = [_read(stranger) for stranger in strangers[4:]]  # at once, and not after a while
        assert refused == [b""] * 16
        for stranger in strangers[:4]:
            assert _read(stranger) == b""
        assert get(port) == "hello"
    finally:
        for stranger in strangers:
            stranger.close()


def test_one_user_of_this_machine_cannot_crowd_out_the_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    others = list[socket.socket]()

    def user_of(peer: tuple[str, int], own: tuple[str, int]) -> int:
        return 1001 if any(peer == other.getsockname() for other in others) else 1000

    monkeypatch.setattr(connection_limits, "user_of", user_of)
    with ExitStack() as stack:
        for number in range(1, 21):  # each from another address of this machine
            other = stack.enter_context(socket.socket())
            other.settimeout(5)
            other.bind((f"127.0.0.{number}", 0))
            others.append(other)
            other.connect(("127.0.0.1", port))
        assert get(port) == "hello"
        assert [_read(other) for other in others[4:]] == [b""] * 16


@pytest.mark.parametrize(
    "said",
    [
        b"POST /take HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\nx",
        b"GET /pour HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /linger HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
    ids=["half a body", "an answer that is not read", "an answer that takes long"],
)
def test_a_stranger_has_its_place_until_it_is_answered_and_little_time_for_that(port: int, said: bytes) -> None:
    with ExitStack() as stack:
        crowd = [stand(stack, port, "127.0.0.2") for _ in range(4)]
        for stranger in crowd:
            stranger.sendall(said)
        assert _read(stand(stack, port, "127.0.0.2")) == b"", "the fifth, at once"
        assert get(port) == "hello", "from elsewhere"
        wait_for(lambda: _is_welcome(port, "127.0.0.2"), 5)
        heard = b"".join(iter(lambda: _read(crowd[0]), b""))
        assert len(heard) < LARGE_BYTES


def _is_welcome(port: int, address: str) -> bool:
    with socket.create_connection(("127.0.0.1", port), 5, source_address=(address, 0)) as stranger:
        try:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        except ConnectionError:
            return False
        return b"hello" in b"".join(iter(lambda: _read(stranger), b""))


def test_a_stranger_asks_for_one_thing_after_the_other(port: int) -> None:
    ask = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 5) as patient:
        for _ in range(3):
            patient.sendall(ask)
            assert b"hello" in _read(patient)
    with socket.create_connection(("127.0.0.1", port), 5) as hasty:
        hasty.sendall(20 * ask)
        assert b"".join(iter(lambda: _read(hasty), b"")).count(b"hello") <= 1


def test_who_has_a_secret_may_wait_for_its_answer(port: int) -> None:
    assert get(port, "/linger", "secret") == "done"
    with pytest.raises(ConnectionError):
        get(port, "/linger", "guess")


def test_a_websocket_that_nobody_has_accepted_a_secret_of_is_cut(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}/echo", proxy=None) as websocket, pytest.raises(ConnectionClosed):
        websocket.recv(timeout=5)


@pytest.mark.parametrize(
    ("open_files", "most", "most_of_one"), [(65536, 1024, 256), (1024, 256, 128), (256, 64, 32), (4, 2, 1)]
)
def test_strangers_leave_most_open_files_to_others(open_files: int, most: int, most_of_one: int) -> None:
    bounds = ConnectionLimits().within(open_files)
    assert (bounds.most, bounds.most_of_one) == (most, most_of_one)


def stand(stack: ExitStack, port: int, address: str) -> socket.socket:
    """A connection from there, on which nothing is said."""
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, source_address=(address, 0)))


@LOOPS
def test_handshakes_that_never_end_have_few_places_and_cost_nobody_elsewhere_theirs(
    authority: CertificateAuthority, loop: Loop | None
) -> None:
    with secured(authority, loop, request_s=60.0) as port, ExitStack() as stack:
        crowd = [stand(stack, port, "127.0.0.2") for _ in range(20)]
        assert [_read(stranger) for stranger in crowd[4:]] == [b""] * 16  # at once
        crowd += [stand(stack, port, "127.0.0.3") for _ in range(4)]
        for stranger in crowd[:4]:
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)  # they stay until their time is over
        for _ in range(3):  # no place comes free by itself
            assert ManagerRemote("127.0.0.1", port, authority.certificate_pem).get("/").body == b"hello"


@LOOPS
def test_handshakes_that_never_begin_are_over_after_their_time(
    authority: CertificateAuthority, loop: Loop | None
) -> None:
    with secured(authority, loop, request_s=0.1) as port, ExitStack() as stack:
        crowd = [stand(stack, port, "127.0.0.2") for _ in range(4)]
        assert [_read(stranger) for stranger in crowd] == [b""] * 4
        assert ManagerRemote("127.0.0.1", port, authority.certificate_pem).get("/").body == b"hello"


def test_neighbours_in_one_network_of_ipv6_are_one_crowd() -> None:
    origins = {origin_of(address) for address in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.1")}
    assert origins == {"2001:db8::/64", "2001:db8:0:1::/64", "10.0.0.1"}
    assert (origin_of("10.0.0.1"), origin_of("fe80::1%eth0"), origin_of("")) == ("10.0.0.1", "fe80::/64", "")
    assert len({origin_of(address) for address in ("127.0.0.1", "127.1.2.3", "::ffff:127.0.0.9")}) == 1


def test_those_whose_secret_was_accepted_are_no_strangers(port: int) -> None:
    with ExitStack() as stack:
        url, secret = f"ws://127.0.0.1:{port}/echo", {"Authorization": "secret"}
        sockets = [stack.enter_context(connect(url, additional_headers=secret, proxy=None)) for _ in range(6)]
        with pytest.raises(TimeoutError):
            sockets[0].recv(timeout=1.5 * PATIENCE_S)
        for websocket in sockets:
            websocket.send("still here")
            assert websocket.recv(timeout=5) == "still here"
        assert get(port) == "hello"


def test_a_server_stops_though_somebody_says_goodbye_and_reads_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    heard = threading.Event()

    async def pour(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("x" * 2**25)
        await websocket.receive()
        heard.set()

    serving = Serving(port=0, max_frame_bytes=1000)
    serving.start(Starlette(routes=[WebSocketRoute("/pour", pour)]))
    with socket.create_connection(("127.0.0.1", serving.port), 5) as deaf:
        key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        deaf.sendall(b"GET /pour HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + key + b"\r\n")
        assert deaf.recv(12) == b"HTTP/1.1 101"
        deaf.sendall(b"\x88\x82\x00\x00\x00\x00\x03\xe8")
        assert heard.wait(10)
        serving.stop()  # a thread that failed would be a warning, and so an error
    assert "Traceback" not in capfd.readouterr().err


def test_garbage_brings_nothing_to_the_terminal_and_a_mistake_of_ours_one_line(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    garbage = [
        b"\x16\x03\x01\x00" * 20 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /take HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\nshort",
        b"POST /take HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\nbroken",
        b"GET /echo HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ]
    for said in garbage:
        with socket.create_connection(("127.0.0.1", port), 5) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while _read(stranger):
                pass
    for _ in range(3):
        get(port, "/fail")
    assert get(port) == "hello"
    said_aloud = capfd.readouterr()
    assert (said_aloud.out, said_aloud.err.splitlines()) == (
        "",
        ["varuna: warning: a request failed with an unexpected error: ZeroDivisionError()"],
    )
