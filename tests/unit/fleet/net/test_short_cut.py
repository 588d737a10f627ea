"""Frames that take the short cut: in order, once, whole, and held back when somebody floods."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from varuna.fleet.net.serving import Serving
from varuna.fleet.net.short_cut import frame_at, receive_all

LIMIT = 200_000

Serve = Callable[[WebSocket], Awaitable[None]]


@contextmanager
def served(serve: Serve) -> Iterator[ClientConnection]:
    serving = Serving(port=0, max_frame_bytes=LIMIT)
    serving.start(Starlette(routes=[WebSocketRoute("/", serve)]))
    try:
        with connect(f"ws://127.0.0.1:{serving.port}/", proxy=None) as client:
            yield client
    finally:
        serving.stop()


def echo(pause_s: float = 0.0) -> tuple[Serve, list[bool], list[int]]:
    """Answers each frame; tells which took the short cut, and the codes of closed connections."""
    short, codes = list[bool](), list[int]()

    async def serve(websocket: WebSocket) -> None:
        await websocket.accept()
        protocol = websocket.scope["extensions"]["varuna.short_cut"]["connection"]
        answers: asyncio.Queue[str] = asyncio.Queue()

        def take(text: str) -> float:
            short.append(protocol.take is not None)
            if text == "bad":
                raise ValueError("it said bad")
            answers.put_nowait(text)
            return pause_s

        async def answer() -> None:
            while True:
                await websocket.send_text(await answers.get())

        answering = asyncio.create_task(answer())
        try:
            codes.append(await receive_all(websocket, take))
        except ValueError as error:
            await websocket.close(4400, str(error))
        finally:
            answering.cancel()

    return serve, short, codes


def test_frames_of_all_sizes_arrive_in_order_and_once_all_but_the_first_by_the_short_cut() -> None:
    serve, short, codes = echo()
    texts = ["a", "", "ü" * 62, "b" * 125, "c" * 126, "d" * 70_000, "e", "f" * LIMIT]
    with served(serve) as client:
        for text in texts:
            client.send(text)
        assert [client.recv(10) for _ in texts] == texts
        client.send(["in ", "parts"])  # a fragmented message goes the usual way
        client.ping().wait(10)
        client.send("after")
        assert [client.recv(10) for _ in range(2)] == ["in parts", "after"]
    assert short[-1]
    assert not short[0]
    assert codes == [1000]


def test_what_the_taker_refuses_ends_the_connection_in_its_way() -> None:
    serve, _, _ = echo()
    with served(serve) as client:
        for text in ("a", "b"):
            client.send(text)
            assert client.recv(10) == text
        client.send("bad")
        with pytest.raises(ConnectionClosed, match="it said bad"):
            client.recv(10)


def test_a_frame_that_is_too_large_is_refused_by_its_head() -> None:
    serve, _, codes = echo()
    with served(serve) as client:
        client.send("a")
        client.recv(10)
        with suppress(ConnectionClosed):  # before it is sent whole
            client.send("x" * (LIMIT + 1))
        with pytest.raises(ConnectionClosed, match="1009"):
            client.recv(10)
    assert codes == [1009]


def test_who_floods_is_not_read_for_a_while() -> None:
    serve, _, _ = echo(pause_s=0.05)
    with served(serve) as client:
        began = time.monotonic()
        for _ in range(4):
            client.send("a")
            client.recv(10)
        assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize("split", range(1, 9))
def test_a_frame_may_come_in_pieces(split: int) -> None:
    """As the transport cuts it."""
    head = bytes([0x81, 0x80 | 126]) + (130).to_bytes(2, "big") + b"\0\0\0\0"
    frame = head + b"x" * 130
    found = frame_at(frame[:split], 0)
    assert found is None or found == (8, 138)
    assert frame_at(frame, 0) == (8, 138)
