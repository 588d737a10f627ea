"""The server for workers: who is let in, and what happens to those who misbehave."""

import queue
import threading
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.unit.fleet.support import make_job, make_plan, make_vote
from tests.waiting import wait_for
from varuna.core.errors import FleetError
from varuna.core.messages import (
    MAX_WORK_BYTES,
    Apply,
    Beat,
    Failed,
    Finish,
    Hello,
    Hold,
    Leaving,
    Recorded,
    Unsaved,
    Voted,
    WorkFound,
    WorkOffered,
    WorkSought,
)
from varuna.fleet.state.inputs import ConnectionLost, MessageReceived
from varuna.fleet.workers import worker_server as server_module
from varuna.fleet.workers.worker_server import WorkerServer
from varuna.membership.managed import ManagedMembership

pytestmark = pytest.mark.timeout(20)

Events = queue.SimpleQueue[MessageReceived | ConnectionLost]


@pytest.fixture
def events() -> Events:
    return queue.SimpleQueue()


def is_ours(name: str) -> bool:
    return name.startswith("w")


@pytest.fixture
def server(events: Events) -> Iterator[WorkerServer]:
    server = WorkerServer(port=0, token="secret", is_ours=is_ours, on_event=events.put)
    server.start()
    yield server
    server.stop()


def knock(server: WorkerServer, worker: str = "w0", token: str = "secret") -> ClientConnection:
    headers = {"Authorization": f"Bearer {token}"}
    return connect(
        f"{server.worker_url}?worker={worker}", additional_headers=headers, proxy=None, close_timeout=1, max_size=None
    )


def close_code(connection: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed):
        connection.recv(timeout=5)
    return connection.close_code


def test_messages_go_both_ways_and_nan_survives(server: WorkerServer, events: Events) -> None:
    plan = make_plan(make_job(), 1, None)
    vote = make_vote(plan, 0, 0)
    vote = vote.model_copy(update={"vector": (float("nan"), float("inf"), *vote.vector[2:])})
    with knock(server) as connection:
        connection.send(Voted(vote=vote).model_dump_json())
        received = events.get(timeout=5)
        assert isinstance(received, MessageReceived)
        assert isinstance(received.message, Voted)
        assert str(received.message.vote) == str(vote)  # NaN is not equal to itself
        server.send("w0", Apply(generation=0, vote=vote))
        assert "NaN" in str(connection.recv(timeout=5))
    assert events.get(timeout=5) == ConnectionLost("w0")


def test_a_wrong_token_is_refused(server: WorkerServer, events: Events) -> None:
    with pytest.raises(InvalidStatus, match="HTTP 403"), knock(server, token="guess"):
        pass
    assert events.empty()


@pytest.mark.parametrize("name", ["", "n0-nobody.77"])
def test_who_has_the_token_and_no_name_of_a_worker_is_refused_and_nobody_hears_of_it(
    server: WorkerServer, events: Events, name: str
) -> None:
    """A data loader, or whatever else a worker has started, has its environment."""
    with pytest.raises(InvalidStatus, match="HTTP 403"), knock(server, name):
        pass
    assert events.empty()


def test_a_second_connection_of_a_worker_is_refused_and_the_first_lives_on(
    server: WorkerServer, events: Events
) -> None:
    with knock(server) as first, knock(server) as second:
        assert close_code(second) == 4409
        first.send(Beat(generation=0, step=0, activity="").model_dump_json())
        assert isinstance(events.get(timeout=5), MessageReceived)


def test_last_words_are_heard_although_an_answer_to_the_words_before_cannot_be_sent(
    server: WorkerServer, events: Events
) -> None:
    last_words = Failed(summary="last words", traceback="", exit_code=1)
    heard: list[MessageReceived | ConnectionLost]
    for number in range(30):  # about one in ten used to be lost
        name = f"w{number}"
        with knock(server, name) as connection:
            for _ in range(4):
                connection.send(Beat(generation=0, step=0, activity="").model_dump_json())
            connection.send(last_words.model_dump_json())
            answering = threading.Thread(target=hear_out, args=(server, events, name, heard := []))
            answering.start()
        answering.join()
        assert heard[-2:] == [MessageReceived(name, last_words), ConnectionLost(name)]


def hear_out(server: WorkerServer, events: Events, name: str, heard: list[MessageReceived | ConnectionLost]) -> None:
    """Answer everything that a worker says, to its end."""
    while not heard or not isinstance(heard[-1], ConnectionLost):
        heard.append(events.get(timeout=5))
        server.send(name, Recorded(step=0))


@pytest.mark.parametrize(
    "frame",
    ["{", '{"kind": "fly"}', b"\x00", Hello(worker="w9", pid=1, version="", job=make_job()).model_dump_json()],
    ids=["no JSON", "unknown", "binary", "another's name"],
)
def test_a_malformed_message_ends_its_connection_only(server: WorkerServer, events: Events, frame: str | bytes) -> None:
    with knock(server, "w1") as other, knock(server) as connection:
        connection.send(frame)
        assert close_code(connection) == 4400
        assert events.get(timeout=5) == ConnectionLost("w0")
        server.send("w1", Finish())
        assert "finish" in str(other.recv(timeout=5))


def test_an_oversize_frame_ends_its_connection(monkeypatch: pytest.MonkeyPatch, events: Events) -> None:
    monkeypatch.setattr(server_module, "MAX_FRAME_BYTES", 1000)
    server = WorkerServer(port=0, token="secret", is_ours=is_ours, on_event=events.put)
    server.start()
    with knock(server) as connection:
        connection.send("x" * 2000)
        assert close_code(connection) == 1009
    assert events.get(timeout=5) == ConnectionLost("w0")
    server.stop()


def test_a_worker_that_reads_nothing_is_dropped(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    server = WorkerServer(port=0, token="secret", is_ours=is_ours, on_event=events.put, queue_frames=16)
    server.start()
    with knock(server) as connection:
        connection.send(Beat(generation=0, step=0, activity="").model_dump_json())
        events.get(timeout=5)
        big = Finish(failure="x" * 2**20)
        for _ in range(64):  # nobody calls recv: client and kernel buffers fill up
            server.send("w0", big)
        assert events.get(timeout=5) == ConnectionLost("w0")
        assert "worker w0 does not read its messages" in capsys.readouterr().err
        connection.socket.close()
    server.stop()


def test_a_taken_port_is_an_error_with_a_way_out(server: WorkerServer) -> None:
    with pytest.raises(FleetError, match=rf"port {server.port} on 127.0.0.1 cannot be used .* --port"):
        WorkerServer(port=server.port, token="", is_ours=is_ours, on_event=lambda event: None)


# -- the client --------------------------------------------------------------------------------------------


def join(server: WorkerServer, token: str = "secret") -> tuple[ManagedMembership, list[int], list[tuple[int, str]]]:
    member = ManagedMembership(server.worker_url, token, "w0")
    return member, *join_as(member)


def join_as(member: ManagedMembership) -> tuple[list[int], list[tuple[int, str]]]:
    """The holds and the flags that the member hears of."""
    holds: list[int] = []
    flags: list[tuple[int, str]] = []
    member.join(
        make_job(),
        beat=lambda: Beat(generation=0, step=0, activity=""),
        on_hold=holds.append,
        on_flag=lambda generation, flag: flags.append((generation, flag)),
    )
    return holds, flags


def test_a_member_says_hello_beats_complains_and_leaves(
    server: WorkerServer, events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    member, _, _ = join(server)
    hello, beat = events.get(timeout=5), events.get(timeout=5)
    assert isinstance(hello, MessageReceived)
    assert isinstance(hello.message, Hello)
    assert isinstance(beat, MessageReceived)
    assert isinstance(beat.message, Beat)
    member.unsaved("no space")
    assert capsys.readouterr().err == "varuna: warning: no space\n"
    member.leaving(3)
    member.close()
    said = []
    while not isinstance(event := events.get(timeout=5), ConnectionLost):
        said.append(event.message)
    assert Unsaved(reason="no space") in said
    assert Leaving(step=3) in said


def test_a_hold_is_delivered_at_once_and_directives_wait(server: WorkerServer, events: Events) -> None:
    member, holds, _ = join(server)
    events.get(timeout=5)
    server.send("w0", Recorded(step=7))
    server.send("w0", Finish(failure="enough"))
    server.send("w0", Hold(generation=4))
    wait_for(lambda: holds == [4], 5)
    assert member.recorded_step == 7
    assert member.next_directive() == Finish(failure="enough")
    member.close()


def test_a_member_that_loses_the_manager_is_told_so_again_and_again(server: WorkerServer, events: Events) -> None:
    member, _, _ = join(server)
    events.get(timeout=5)
    server.stop()
    for _ in range(2):
        with pytest.raises(FleetError, match="lost the manager"):
            member.next_directive()
    member.failed("late", "", 1)  # returns, although nobody listens


def test_a_member_with_a_wrong_token_learns_why(server: WorkerServer) -> None:
    with pytest.raises(FleetError, match=r"was refused by the manager at .*: wrong token"):
        join(server, token="guess")


def test_without_a_manager_a_member_cannot_join() -> None:
    member = ManagedMembership("ws://127.0.0.1:9/worker", "", "w0")
    with pytest.raises(FleetError, match="cannot reach the manager"):
        join_as(member)


# -- work of others ------------------------------------------------------------------------------------------


def seeking(
    server: WorkerServer, key: str, bound_s: float = 20.0
) -> tuple[ManagedMembership, list[bytes], threading.Thread]:
    """A worker that has not joined, and asks."""
    member, found = ManagedMembership(server.worker_url, "secret", "w0"), list[bytes]()
    thread = threading.Thread(target=lambda: found.append(member.seek_work(key, "the model", bound_s)))
    thread.start()
    return member, found, thread


def test_work_of_others_is_taken_over_before_a_worker_joins(server: WorkerServer, events: Events) -> None:
    member, found, thread = seeking(server, "k")
    assert events.get(timeout=5) == MessageReceived("w0", WorkSought(key="k"))
    server.send("w0", WorkFound(key="another's", data=b"no"))
    server.send("w0", WorkFound(key="k", data=b"\x00graphs\xff"))
    thread.join(5)
    assert found == [b"\x00graphs\xff"]
    member.offer_work("k2", b"mine")
    member.offer_work("k3", bytes(MAX_WORK_BYTES + 1))
    assert events.get(timeout=5) == MessageReceived("w0", WorkOffered(key="k2", data=b"mine"))
    assert events.get(timeout=5) == MessageReceived("w0", WorkOffered(key="k3", data=b"")), "too long"
    member.close()


@pytest.mark.nightly
def test_work_that_nobody_answers_for_is_asked_for_again_and_then_done_here(
    server: WorkerServer, events: Events
) -> None:
    member, found, thread = seeking(server, "k")
    for _ in range(3):
        assert events.get(timeout=5) == MessageReceived("w0", WorkSought(key="k"))
    thread.join(5)
    assert found == [b""]
    member.close()


@pytest.mark.nightly
def test_work_that_somebody_does_is_waited_for_but_not_for_ever(server: WorkerServer, events: Events) -> None:
    member, found, thread = seeking(server, "k", bound_s=8.5)
    for _ in range(5):
        assert events.get(timeout=5) == MessageReceived("w0", WorkSought(key="k"))
        assert thread.is_alive()
        server.send("w0", WorkFound(key="k", doer="w1"))
    thread.join(5)
    assert found == [b""]
    member.close()


def test_without_a_manager_work_is_done_here(server: WorkerServer, events: Events) -> None:
    member, found, thread = seeking(server, "k")
    events.get(timeout=5)
    server.stop()
    thread.join(5)
    assert found == [b""]
    assert member.seek_work("k", "the model") == b"", "at once"
    assert ManagedMembership("ws://127.0.0.1:9/worker", "", "w0").seek_work("k", "the model") == b""


def test_a_worker_that_was_ended_before_it_joined_waits_for_nothing(server: WorkerServer) -> None:
    member = ManagedMembership(server.worker_url, "secret", "w0")
    member.close()
    with pytest.raises(FleetError, match="was ended before it had joined"):
        join_as(member)
