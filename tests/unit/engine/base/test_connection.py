"""Two ends of a connection: what crosses, what waits, and that every transfer ends."""

import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.waiting import wait_for
from varuna.engine.base.connection import Connection, Work

LARGE_BYTES = 32 * 2**20


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = (Connection(each, name) for each, name in zip(pair(), ("to b", "to a"), strict=True))
    yield one, other
    one.end()
    other.end()


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def values(size_bytes: int, first: int = 0) -> Tensor:
    return torch.arange(first, first + size_bytes).remainder(251).to(torch.uint8)


def outcome(work: Work) -> list[str]:
    """Say how it ends; empty until then."""
    said: list[str] = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append("done")

    threading.Thread(target=wait, daemon=True).start()
    return said


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 4096, LARGE_BYTES])
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_message_lands_in_the_memory_that_it_is_for(
    ends: tuple[Connection, Connection], size_bytes: int, asked_first: bool
) -> None:
    room, given = torch.zeros(size_bytes, dtype=torch.uint8), values(size_bytes)
    works: list[Callable[[], Work]] = [lambda: ends[1].receive(room, 5), lambda: ends[0].send(given, 5)]
    begun = [work() for work in (works if asked_first else reversed(works))]
    for work in begun:
        work.wait(30)
    assert torch.equal(room, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_and_form_crosses(ends: tuple[Connection, Connection], dtype: torch.dtype) -> None:
    given = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for each in (given, given[0, 0, 0].clone(), given[:0]):
        room = torch.empty_like(each)
        arrives = ends[1].receive(room, 1)
        ends[0].send(each, 1).wait(30)
        arrives.wait(30)
        assert torch.equal(room, each)


def test_a_tensor_with_gaps_is_refused(ends: tuple[Connection, Connection]) -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        ends[0].send(torch.zeros(4, 4).t(), 1)


def test_messages_of_a_tag_keep_their_order_whatever_waits_under_other_tags(
    ends: tuple[Connection, Connection],
) -> None:
    """Both ways at once, under three tags of which each end asks in an order of its own."""
    chance = random.Random(4)
    sizes = {tag: [chance.choice((1, 900, 300_000)) for _ in range(12)] for tag in range(3)}
    begun, rooms = [], {}
    for end, connection in enumerate(ends):
        for tag in range(3):
            begun += [connection.send(values(size, 7 * n + end), tag) for n, size in enumerate(sizes[tag])]
    for end, connection in enumerate(ends):
        for tag in chance.sample(range(3), 3):
            rooms[end, tag] = [torch.zeros(size, dtype=torch.uint8) for size in sizes[tag]]
            begun += [connection.receive(room, tag) for room in rooms[end, tag]]
    for work in begun:
        work.wait(30)
    for (end, _), found in rooms.items():
        for n, room in enumerate(found):
            assert torch.equal(room, values(room.numel(), 7 * n + 1 - end))


def test_what_nobody_asks_for_stays_and_does_not_hold_up_anything_else(ends: tuple[Connection, Connection]) -> None:
    stays = outcome(ends[0].send(values(LARGE_BYTES), 1))
    room = torch.zeros(8, dtype=torch.uint8)
    ends[0].send(values(8), 2)
    ends[1].receive(room, 2).wait(30)
    assert torch.equal(room, values(8))
    assert not stays


def test_giving_never_blocks_though_the_other_end_does_not_read() -> None:
    one, other = pair()
    connection = Connection(one, "to b")
    sent = [outcome(connection.send(values(LARGE_BYTES), 1)) for _ in range(3)]
    for _ in range(3):
        other.sendall(struct.pack("<qqB", 1, LARGE_BYTES, 0))  # it asks, and reads nothing
    asks = [connection.receive(torch.zeros(8, dtype=torch.uint8), 2) for _ in range(3)]
    wait_for(lambda: threads("write-to b") == 1, 20)
    connection.end("enough")
    wait_for(lambda: all(sent), 20)
    assert [said for [said] in sent] == ["enough (to b)"] * 3
    for ask in asks:
        with pytest.raises(RuntimeError, match=r"enough \(to b\)"):
            ask.wait(20)
    other.close()


def threads(name: str) -> int:
    return sum(thread.name == f"varuna-{name}" for thread in threading.enumerate())


@pytest.mark.parametrize("how", ["here", "there", "cut", "reset"])
@pytest.mark.parametrize("at", ["sent", "half-way", "asked"])
def test_every_transfer_ends_when_the_connection_does(how: str, at: str) -> None:
    """Also the one that is half-way, on either side, and no thread and no descriptor stays."""
    sockets = pair()
    one, other = (Connection(each, name) for each, name in zip(sockets, ("to b", "to a"), strict=True))
    given, room = values(LARGE_BYTES), torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    works: list[Work] = []
    if at != "asked":
        works += [one.send(given, 1), one.send(given[:5], 2)]
    if at != "sent":
        works += [other.receive(room, 1), other.receive(room[:5], 3)]
    said = [outcome(work) for work in works]
    time.sleep(0.02)
    if how == "here":
        one.end()
    elif how == "there":
        other.end()
    elif how == "cut":
        sockets[0].shutdown(socket.SHUT_RDWR)
    else:
        sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sockets[1].shutdown(socket.SHUT_RDWR)
    wait_for(lambda: all(said), 20)
    one.end()
    other.end()
    wait_for(
        lambda: not threads("read-to a") + threads("read-to b") + threads("write-to a") + threads("write-to b"), 20
    )
    assert [each.fileno() for each in sockets] == [-1, -1]


@pytest.mark.parametrize("seed", range(8))
def test_a_connection_that_ends_at_any_moment_leaves_nobody_waiting(seed: int) -> None:
    """Gloo may forget a message that was half-way: its sender and its receiver then wait for a day."""
    chance = random.Random(seed)
    for _ in range(6):
        both = [Connection(each, "to it") for each in pair()]
        said: list[list[str]] = []
        for _ in range(chance.randrange(1, 5)):
            tag, size = chance.randrange(2), chance.choice((1, 70_000, 6_000_000))
            for end in chance.sample(range(2), 2):
                buffer = torch.zeros(size, dtype=torch.uint8)
                said.append(outcome((both[0].send if end else both[1].receive)(buffer, tag)))
        if chance.random() < 0.7:
            time.sleep(chance.random() * 0.004)
        for connection in chance.sample(both, 2):
            connection.end()
        wait_for(lambda said=said: all(said), 20)  # type: ignore[misc]


@pytest.mark.parametrize("round_", range(10))
def test_what_a_peer_sent_before_it_left_arrives_though_nothing_can_be_written_to_it(round_: int) -> None:
    """As when a rank has given its last result and leaves: the others still ask it for what comes next."""
    one, other = pair()
    given = values(100_000, round_)
    other.sendall(struct.pack("<qqB", 1, given.nbytes, 1) + given.numpy().tobytes())
    other.close()
    connection, room = Connection(one, "to b"), torch.zeros(given.nbytes, dtype=torch.uint8)
    first = connection.receive(room, 1)
    with contextlib.suppress(RuntimeError):  # the reader was faster
        for _ in range(3):
            connection.receive(torch.zeros(1), 2)
    first.wait(20)
    assert torch.equal(room, given)
    connection.end()


class SlowToReturn(socket.socket):
    """Its writes come back late, as where other threads have the interpreter: what they wrote is there long before."""

    def sendmsg(self, *args: Any) -> int:
        written = super().sendmsg(*args)
        time.sleep(0.1)
        return written


@pytest.mark.parametrize("size_bytes", [1, 30_000_000])
def test_a_message_that_the_peer_has_is_through_though_it_leaves_at_once(size_bytes: int) -> None:
    """A rank that has received everything may close its connections, as after a barrier."""
    near, far = pair()
    one, other = Connection(SlowToReturn(fileno=near.detach()), "to b"), Connection(far, "to a")
    small, room = torch.zeros(1), torch.zeros(size_bytes, dtype=torch.uint8)
    arrives = other.receive(room, 1)
    other.send(small, 2)
    one.receive(small, 2).wait(20)  # what the other one asks for is known by now

    def leave() -> None:
        arrives.wait(20)
        other.end()

    leaves = threading.Thread(target=leave)
    leaves.start()
    one.send(values(size_bytes), 1).wait(20)
    leaves.join(20)
    one.end()


def test_what_ended_a_connection_is_said_to_whoever_comes_later(ends: tuple[Connection, Connection]) -> None:
    waits = outcome(ends[0].receive(torch.zeros(1), 1))
    ends[1].end()
    wait_for(lambda: bool(waits), 20)
    assert waits == ["connection closed by the peer (to b)"]
    with pytest.raises(RuntimeError, match=r"connection closed by the peer \(to b\)"):
        ends[0].send(torch.zeros(1), 1)


def test_ends_that_disagree_on_a_size_say_both(ends: tuple[Connection, Connection]) -> None:
    sent = outcome(ends[0].send(torch.zeros(4), 9))
    asked = outcome(ends[1].receive(torch.zeros(2), 9))
    wait_for(lambda: bool(sent and asked), 20)
    assert sent == ["the peer asked for 8 bytes of tag 9, and 16 are to be sent (to b)"]
    assert asked == ["connection closed by the peer (to a)"]


@pytest.mark.parametrize("frame", [struct.pack("<qqB", 3, 1 << 40, 1), struct.pack("<qqB", 3, 4, 1)])
def test_bytes_that_nobody_asked_for_end_the_connection(frame: bytes) -> None:
    one, other = pair()
    connection = Connection(one, "to b")
    waits = outcome(connection.receive(torch.zeros(2), 3))
    other.sendall(frame)
    wait_for(lambda: bool(waits), 20)
    assert "that nobody asked for (to b)" in waits[0]
    other.close()


def test_a_wait_ends_with_its_bound_and_the_memory_is_free_then(ends: tuple[Connection, Connection]) -> None:
    work = ends[0].receive(torch.zeros(1), 1)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.1 s \(to b\)"):
        work.wait(0.1)
    with pytest.raises(RuntimeError, match="timed out"):
        ends[0].send(torch.zeros(1), 1)


def test_a_message_is_kept_until_it_is_through_and_no_longer(ends: tuple[Connection, Connection]) -> None:
    freed = threading.Event()

    def give() -> None:
        given = torch.full((LARGE_BYTES,), 3, dtype=torch.uint8)
        weakref.finalize(given.untyped_storage(), freed.set)
        ends[0].send(given, 1)

    give()
    gc.collect()
    assert not freed.is_set()
    room = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    ends[1].receive(room, 1).wait(30)
    assert set(room[:: 2**20].tolist()) == {3}


def test_no_descriptor_is_left() -> None:
    def here() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("counts descriptors as Linux shows them")
    before = here()
    for _ in range(20):
        one, other = (Connection(each, "to it") for each in pair())
        one.send(torch.zeros(8), 1)
        other.receive(torch.zeros(8), 1).wait(20)
        one.end()
        other.end()
    wait_for(lambda: here() <= before, 20)


def test_a_message_whose_wait_failed_is_not_kept(ends: tuple[Connection, Connection]) -> None:
    """Nor until the next collection of garbage: messages are large."""
    freed = threading.Event()

    def fail() -> None:
        given = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        weakref.finalize(given.untyped_storage(), freed.set)
        work = ends[0].send(given, 1)
        del given
        ends[0].end()
        with contextlib.suppress(RuntimeError):
            work.wait(20)
            raise AssertionError("the group was abandoned")

    gc.disable()
    try:
        fail()
        wait_for(freed.is_set, 20)
    finally:
        gc.enable()
