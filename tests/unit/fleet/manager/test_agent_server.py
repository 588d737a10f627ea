"""The server for agents, in memory: who comes in, what gets through, and what happens to those who misbehave."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient, WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from tests.depth import by_depth
from tests.unit.fleet.support import join, make_job
from tests.waiting import wait_for
from varuna import __version__
from varuna.core.messages import Beat, Finish, Hello, Relay
from varuna.core.node_notices import PreemptionNotice
from varuna.fleet.manager.agent_server import MOST_MALFORMED, AgentLink, AgentServer
from varuna.fleet.manager.mailbox import Pulses
from varuna.fleet.manager.reconcile import Reconciliation
from varuna.fleet.net.protocol import (
    BAD_MESSAGE,
    STALLED,
    DownItem,
    Exited,
    Greet,
    Identity,
    JobIdentity,
    Joined,
    Output,
    Parted,
    ProcessEnded,
    Pulse,
    Said,
    Started,
    Tell,
    UpBody,
    UpItem,
    Welcome,
    WorkerSnapshot,
    down_frame,
)
from varuna.fleet.net.source import SOURCE_HEADER, other_source, source
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.registry import Registry, hashed
from varuna.fleet.run_folder.worker_logs import LogKeeper
from varuna.fleet.state.inputs import (
    ConnectionLost,
    Event,
    MessageReceived,
    NodeParted,
    NoticeReceived,
    WorkerDistrusted,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.run_events import Audited

JOB = JobIdentity(version=__version__, script="train.py", script_sha256="a", args_sha256="b")


class Gate:
    """A door with one agent that belongs to the run."""

    def __init__(self, folder: Path) -> None:
        self.registry = Registry(folder)
        self.heard: list[Event | Reconciliation | Pulses] = []
        self.events: list[Event | Reconciliation] = []
        self.pulses: list[tuple[str, Mapping[str, Beat]]] = []
        self.audited: list[Audited] = []
        self.shown: list[str] = []
        self.folder = folder
        self.logs = LogKeeper(folder)
        self.door = AgentServer(
            registry=self.registry,
            certificate_pem="PEM",
            manager="m1",
            run="r1",
            post=self.note,
            logs=self.logs,
            audit=Audit(self.audited.append, warn=self.shown.append),
            write=lambda line: None,
            return_s=0.05,
            revoked_s=0.2,
        )
        self.client = TestClient(Starlette(routes=self.door.routes()))
        self.me = self.join()

    def note(self, event: Event | Reconciliation | Pulses) -> None:
        self.heard.append(event)
        if isinstance(event, Pulses):
            self.pulses += event.beats
        else:
            self.events.append(event)

    def join(self) -> Identity:
        return join(self.registry)

    @contextmanager
    def knock(self, identity: Identity | None = None, source: str = "") -> Iterator[WebSocketTestSession]:
        who = identity or self.me
        headers = {"Authorization": f"Bearer {who.secret}", **({SOURCE_HEADER: source} if source else {})}
        with self.client.websocket_connect(f"/agent?node={who.node}", headers=headers) as session:
            yield session

    @contextmanager
    def visit(self, identity: Identity | None = None, **greet: Any) -> Iterator["Visit"]:
        with self.knock(identity) as session:
            session.send_text(Greet(**{"session": "s1", "job": JOB, **greet}).model_dump_json())
            yield Visit(session, (identity or self.me).node)

    def on_loop(self, work: Callable[[], None]) -> None:
        async def run() -> None:
            work()

        assert self.client.portal is not None
        self.client.portal.call(run)

    def refused(self, who: Identity) -> str:
        with pytest.raises(WebSocketDenialResponse) as raised, self.knock(who):
            pass
        assert raised.value.status_code == 403
        error: str = raised.value.json()["error"]
        return error

    def refusals(self) -> list[str]:
        return [line.why for line in self.audited if not line.allowed]


class Visit:
    """An agent's end of a connection."""

    def __init__(self, session: WebSocketTestSession, node: str) -> None:
        self.session, self.node = session, node
        self.sent = self.received = 0

    def say(self, body: UpBody) -> None:
        self.sent += 1
        self.session.send_text(UpItem(number=self.sent, received=self.received, body=body).model_dump_json())

    def sync(self) -> int:
        """A pulse and its answer: all that was said before has been heard."""
        self.session.send_text(Pulse(received=self.received).model_dump_json())
        while isinstance(frame := self.hear(), Welcome | DownItem):
            pass
        received: int = frame.received
        return received

    def hear(self) -> Any:
        return down_frame.validate_json(self.session.receive_text())

    def closed(self) -> tuple[int, str]:
        while True:
            try:
                self.session.receive_text()
            except WebSocketDisconnect as closed:
                return closed.code, closed.reason


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    with gate.client:
        yield gate
    gate.registry.close()


def request(**changes: Any) -> dict[str, Any]:
    return {"token": "guess", "version": __version__, "hostname": "vm", "secret_sha256": hashed("chosen"), **changes}


def test_a_token_buys_a_name_and_a_secret_once(gate: Gate) -> None:
    body = request(token=gate.registry.mint())
    answer = gate.client.post("/join", json=body)
    assert answer.status_code == 201
    node = Joined.model_validate_json(answer.content).node
    gate.registry.check(node, "chosen")
    assert gate.client.post("/join", json=body).json() == {"node": node}  # the answer was lost: nothing is spent
    body["secret_sha256"] = hashed("another")
    assert gate.client.post("/join", json=body).status_code == 403
    assert [line.action for line in gate.audited if line.allowed] == [f"join as {node}"] * 2


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (request(), 403, "unknown"),
        (request(version="0.0.1"), 409, "install the same version"),
        (request(hostname="x" * 300), 422, "hostname"),
        (request(more=1), 422, "more"),
        ({}, 422, "token"),
        ("x" * 20_000, 413, "larger than"),
    ],
)
def test_whoever_may_not_join_is_told_why_and_written_down(gate: Gate, body: Any, status: int, said: str) -> None:
    answer = gate.client.post("/join", json=body)
    assert (answer.status_code, said in answer.json()["error"]) == (status, True)
    assert len(gate.refusals()) == 1
    assert gate.shown == []  # strangers cannot write on the user's terminal


def test_an_older_version_with_this_runs_token_is_shown_to_the_user_once(gate: Gate) -> None:
    for _ in range(3):
        answer = gate.client.post("/join", json=request(version="0.0.1", token=gate.registry.mint()))
        assert answer.status_code == 409
    [shown] = gate.shown
    assert f"it runs Varuna 0.0.1, the manager {__version__}: install the same there" in shown


def test_what_an_agent_says_reaches_the_manager_in_order_and_once(gate: Gate) -> None:
    worker = f"{gate.me.node}.0"
    hello = Hello(worker=worker, pid=1, version="1", job=make_job())
    with gate.visit() as agent:
        welcome = agent.hear()
        assert (welcome.run, welcome.resumed) == ("r1", False)
        agent.say(Started(worker=worker))
        agent.say(Said(worker=worker, message=hello))
        agent.session.send_text(UpItem(number=2, received=0, body=Started(worker=worker)).model_dump_json())  # again
        agent.say(Output(worker=worker, offset=0, data=b"\xff\x00text\n"))
        agent.say(PreemptionNotice(in_s=30, reason="spot"))
        agent.say(ProcessEnded(worker=worker, exited=Exited(code=3)))
        assert agent.sync() == 5
    reconciliation, spawned, heard, notice, exited = gate.events
    assert reconciliation == Reconciliation(gate.me.node, ())
    assert spawned == WorkerSpawned(worker, node=gate.me.node)
    assert heard == MessageReceived(worker, hello)
    assert isinstance(notice, NoticeReceived)
    assert exited == WorkerExited(worker, 3, "")
    assert gate.logs.wait_until_written()
    assert (gate.folder / f"{worker}.log").read_bytes() == b"\xff\x00text\n"


def test_a_broken_connection_loses_nothing_that_was_on_its_way(gate: Gate) -> None:
    worker = f"{gate.me.node}.0"
    with gate.visit() as agent:
        agent.hear()
        agent.say(Started(worker=worker))
        agent.sync()
        gate.door.send(gate.me.node, Tell(worker=worker, message=Finish(failure="one")))
    gate.door.send(gate.me.node, Tell(worker=worker, message=Finish(failure="two")))
    with gate.visit(manager="m1", received=0) as agent:
        welcome = agent.hear()
        assert (welcome.resumed, welcome.received) == (True, 1)
        assert [agent.hear().body.message.failure for _ in range(2)] == ["one", "two"]
    heard = [event for event in gate.events if not isinstance(event, NodeParted)]  # where this machine is slow
    assert heard == [Reconciliation(gate.me.node, ()), WorkerSpawned(worker, node=gate.me.node)]


def test_another_manager_or_another_life_of_the_agent_begins_anew(gate: Gate) -> None:
    worker = f"{gate.me.node}.0"
    snapshot = WorkerSnapshot(worker=worker, said=(Hello(worker=worker, pid=1, version="1", job=make_job()),))
    for session, manager in (("s1", "m0"), ("s2", "m1")):
        with gate.visit(session=session, manager=manager, snapshots=(snapshot,)) as agent:
            assert not agent.hear().resumed
        assert gate.events[-1] == Reconciliation(gate.me.node, (snapshot,))
    with gate.visit(manager="m0", run="another", snapshots=(snapshot,)) as agent:
        agent.hear()
    assert gate.events[-1] == Reconciliation(gate.me.node, ())  # its workers belong to a run that is over


@pytest.mark.parametrize("secret", ["", "guess", None])
def test_a_wrong_secret_is_refused(gate: Gate, secret: str | None) -> None:
    who = gate.me.model_copy(update={"secret": gate.join().secret if secret is None else secret})
    assert "secret is wrong" in gate.refused(who)
    assert gate.refusals()
    assert not gate.events


def test_a_drained_machine_may_not_come_back(gate: Gate) -> None:
    with gate.visit() as agent:
        agent.hear()
        gate.registry.revoke(gate.me.node, "drained")
        gate.on_loop(lambda: gate.door.dismiss(gate.me.node, "drained", 0, drained=True))
        assert agent.hear().body.drained
    assert gate.refused(gate.me) == f"node {gate.me.node} was removed (drained): join again with a new token"


def test_a_drained_machine_may_not_go_on_over_the_connection_that_it_has(gate: Gate) -> None:
    with gate.visit() as agent:
        agent.hear()
        agent.say(Started(worker=f"{gate.me.node}.0"))
        gate.on_loop(lambda: gate.door.dismiss(gate.me.node, "drained", 0, drained=True))
        assert agent.closed() == (STALLED, "its secret was revoked")
    assert gate.events[-1] == ConnectionLost(f"{gate.me.node}.0")


def test_a_machine_that_is_not_trusted_any_more_is_gone_at_once(gate: Gate) -> None:
    worker = f"{gate.me.node}.0"
    with gate.visit() as agent:
        agent.hear()
        agent.say(Started(worker=worker))
        agent.sync()
        gate.on_loop(lambda: gate.door.send_away(gate.me.node, "its machine was removed"))
        assert agent.closed() == (STALLED, "its machine was removed")
    assert WorkerDistrusted(worker, "its machine was removed") in gate.events  # its links would go on
    gate.on_loop(lambda: gate.door.send_away("n9", "never there"))


def test_another_script_is_refused(gate: Gate) -> None:
    with gate.visit() as agent:
        agent.hear()
    with gate.visit(gate.join(), job=JOB.model_copy(update={"script_sha256": "c"})) as agent:
        code, reason = agent.closed()
    assert (code, "same file" in reason) == (4403, True)
    assert "was not let in: its script train.py differs from the run's" in gate.shown[0]


def test_two_agents_with_one_identity_do_not_take_turns(gate: Gate) -> None:
    with gate.visit() as first:
        first.hear()
        with gate.visit(session="s2") as second:
            assert second.closed() == (
                4409,
                "an agent with this identity is already connected: give each agent its own --state-dir.",
            )
        assert first.sync() == 0


@pytest.mark.parametrize(
    ("claim", "said"), [("exit", "speaks for worker"), ("beat", "speaks for worker"), ("name", "claims to be")]
)
def test_an_agent_speaks_for_its_own_workers_only_and_they_for_themselves(gate: Gate, claim: str, said: str) -> None:
    other = gate.join()
    mine, foreign = f"{gate.me.node}.0", f"{other.node}.0"
    with gate.visit(other) as victim:
        victim.hear()
        with gate.visit() as agent:
            agent.hear()
            agent.say(Started(worker=mine))
            match claim:
                case "exit":
                    agent.say(ProcessEnded(worker=foreign, exited=Exited(code=1)))
                case "beat":
                    beats = {foreign: Beat(generation=0, step=0, activity="")}
                    agent.session.send_text(Pulse(received=0, beats=beats).model_dump_json())
                case _:
                    agent.say(Said(worker=mine, message=Hello(worker=foreign, pid=1, version="1", job=make_job())))
            assert agent.closed()[0] == 4400
        assert victim.sync() == 0
    assert not [event for event in gate.events if isinstance(event, ConnectionLost)], "it keeps its own"
    assert not [event for event in gate.events if isinstance(event, WorkerExited | MessageReceived)]
    assert said in gate.refusals()[-1]
    assert not gate.pulses


def test_an_agent_that_is_not_understood_once_goes_on_after_that_message_and_one_that_never_is_loses_its_workers(
    gate: Gate,
) -> None:
    mine, foreign = f"{gate.me.node}.0", f"{gate.join().node}.0"
    with gate.visit() as agent:
        agent.hear()
        agent.say(Started(worker=mine))
        agent.say(Parted(worker=foreign))
        assert agent.closed()[0] == BAD_MESSAGE
    with gate.visit(manager="m1") as agent:
        assert (agent.hear().received, agent.sync()) == (2, 2)
        agent.sent = 2
        agent.say(Started(worker=mine))
    for _ in range(MOST_MALFORMED):
        assert not [event for event in gate.events if isinstance(event, ConnectionLost)]
        with gate.visit(manager="m1") as agent:
            assert agent.hear().resumed
            agent.session.send_text("{")
            assert agent.closed()[0] == BAD_MESSAGE
    assert [event for event in gate.events if isinstance(event, ConnectionLost)] == [ConnectionLost(mine)]
    with gate.visit(manager="m1") as agent:
        assert not agent.hear().resumed


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("0.1.0+00000000", "the manager is Varuna {mine}, this agent 0.1.0+00000000: install the same one on both"),
        ("{mine}", "malformed: more: Extra inputs are not permitted"),
        ("", "malformed: more: Extra inputs are not permitted"),
    ],
)
def test_an_agent_of_another_source_is_told_so(gate: Gate, theirs: str, said: str) -> None:
    expected = said.format(mine=source())
    with gate.knock(source=theirs.format(mine=source())) as session:
        session.send_text(json.dumps({**Greet(session="s1", job=JOB).model_dump(), "more": 1}))
        assert Visit(session, gate.me.node).closed() == (4400, expected)
    assert gate.refusals() == [expected]


def test_the_reason_with_which_a_connection_is_closed_fits(gate: Gate) -> None:
    assert len(other_source("1234.5678.9012rc1+3f2a91bc", "1234.5678.9012rc1+91bc3f2a").encode()) <= 120


@pytest.mark.parametrize(("code", "abruptly"), [(1000, False), (1005, True)])
def test_an_agent_is_heard_without_its_workers_and_its_absence_is_no_word_about_them(
    gate: Gate, code: int, abruptly: bool
) -> None:
    with gate.visit() as agent:
        agent.hear()
        agent.say(Started(worker=f"{gate.me.node}.0"))
        agent.sync()
        wait_for(lambda: gate.pulses == [(gate.me.node, {})], 5)
        agent.session.close(code)
    wait_for(lambda: isinstance(gate.events[-1], NodeParted), 5)
    assert gate.events[-1] == NodeParted(gate.me.node, abruptly=abruptly)
    assert not [event for event in gate.events if isinstance(event, ConnectionLost)]


def test_beats_of_many_workers_come_in_one_pulse(gate: Gate) -> None:
    beats = {f"{gate.me.node}.{k}": Beat(generation=0, step=k, activity="") for k in range(3)}
    with gate.visit() as agent:
        agent.hear()
        agent.session.send_text(Pulse(received=0, beats=beats).model_dump_json())
        agent.hear()
        wait_for(lambda: gate.pulses == [(gate.me.node, beats)], 5)
        agent.session.send_text(Pulse(received=0, beats=dict.fromkeys(beats)).model_dump_json())
        agent.hear()
        wait_for(lambda: gate.pulses == [(gate.me.node, beats), (gate.me.node, beats)], 5)
    with gate.visit() as agent:
        agent.session.send_text(Pulse(received=0, beats=dict.fromkeys(beats)).model_dump_json())
        assert agent.closed()[0] == BAD_MESSAGE, "on a new connection nothing was before"


def test_only_a_pulse_that_asks_is_answered_and_what_follows_a_pulse_is_heard_after_it(gate: Gate) -> None:
    worker = f"{gate.me.node}.0"
    beat = Beat(generation=0, step=1, activity="")
    with gate.visit() as agent:
        agent.hear()
        agent.say(Started(worker=worker))
        agent.session.send_text(Pulse(received=0, asks=False, beats={worker: beat}).model_dump_json())
        agent.say(Parted(worker=worker))
        assert agent.sync() == 2, "the first answer is that to the second pulse"
    assert gate.heard[1:4] == [
        WorkerSpawned(worker, node=gate.me.node),
        Pulses(((gate.me.node, {worker: beat}),)),
        ConnectionLost(worker),
    ]


frames = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["kind", "number", "received", "body", "beats", "worker"]), inner)
        ),
        max_leaves=10,
    ).map(json.dumps),
    st.builds(
        lambda kind, body: json.dumps({"kind": kind, "number": 1, "received": 0, "body": body, "beats": body}),
        st.sampled_from(["item", "pulse", "greet", "answer"]),
        st.dictionaries(
            st.sampled_from(["kind", "worker", "in_s", "reason", "data", "offset", "exited", "message"]),
            st.sampled_from(["noticed", "output", "said", "../../x", "n0-vm.0", -1, 1e308, None, "A" * 100]),
        ),
    ),
)


@settings(max_examples=by_depth(6, 80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.booleans(), frame=frames)
def test_no_frame_breaks_the_door_or_disturbs_others(gate: Gate, first: bool, frame: str | bytes) -> None:
    with gate.visit(gate.me, session="calm") as calm:
        calm.hear()
        hostile = gate.join()
        with gate.knock(hostile) as session:
            if not first:
                session.send_text(Greet(session="s", job=JOB).model_dump_json())
                session.receive_text()
            if isinstance(frame, bytes):
                session.send_bytes(frame)
            else:
                session.send_text(frame)
            if first:
                assert Visit(session, "").closed()[0] == 4400
        calm.sync()
    assert not [event for event in gate.events if isinstance(event, MessageReceived | WorkerExited)]


def test_a_connection_in_which_a_frame_is_stuck_can_be_cut(tmp_path: Path) -> None:
    """Its other end greets; from then on it takes nothing in and says nothing."""
    gate, closed = Gate(tmp_path), list[int]()
    greet = Greet(session="s", job=JOB).model_dump_json()
    frames = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": greet}])

    async def receive() -> Any:
        if (frame := next(frames, None)) is None:
            await asyncio.Event().wait()
        return frame

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "websocket.send":
            assert gate.door.connected == [gate.me.node]
            asyncio.get_running_loop().call_later(0.02, gate.door.send_away, gate.me.node, "it is silent")
            await asyncio.Event().wait()
        if message["type"] == "websocket.close":
            closed.append(message["code"])

    async def converse() -> None:
        who, secret = f"node={gate.me.node}".encode(), f"Bearer {gate.me.secret}".encode()
        scope = {"type": "websocket", "path": "/agent", "query_string": who, "headers": [(b"authorization", secret)]}
        await asyncio.wait_for(Starlette(routes=gate.door.routes())(scope, receive, send), 5)

    asyncio.run(converse())
    gate.registry.close()
    assert closed == [STALLED]
    assert gate.door.connected == []


def test_a_full_disk_costs_an_agents_logs_and_not_the_agent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "n0.0.log").symlink_to("/dev/full")
    now = [0.0]
    keeper = LogKeeper(folder, clock=lambda: now[0])
    for offset in (0, 3):
        keeper.write(Output(worker="n0.0", offset=offset, data=b"abc"))
    assert keeper.wait_until_written()
    assert capfd.readouterr().err.count("n0.0.log is missing output: No space left on device") == 1
    now[0] = 61.0  # there may be room now
    keeper.write(Output(worker="n0.1", offset=0, data=b"abc"))
    assert keeper.wait_until_written()
    assert (folder / "n0.1.log").read_bytes() == b"abc"


# -- pure: patience ------------------------------------------------------------------------------------------


def test_a_flood_is_slowed_down_to_a_bearable_rate() -> None:
    link, now_s, frames_read = AgentLink("n0", "s", 0.0), 0.0, 0
    while now_s < 60:
        frames_read += 1
        now_s += link.pause_s(now_s) + 1e-5
    assert frames_read < 60 * 500 + 3000
    heavy, now_s, read_bytes = AgentLink("n2", "s", 0.0), 0.0, 0
    while now_s < 60:
        read_bytes += 60 * 2**20
        now_s += heavy.pause_s(now_s, 60 * 2**20) + 0.01
    assert read_bytes < (60 * 8 + 3 * 64) * 2**20
    quiet = AgentLink("n1", "s", 0.0)
    assert all(quiet.pause_s(second / 10) == 0 for second in range(600))


def test_who_is_silent_or_confirms_nothing_is_stalled() -> None:
    link = AgentLink("n0", "s", 0.0)
    assert not link.is_stalled(14, 15)
    assert link.is_stalled(16, 15)
    link.heard_s = 100
    link.send(Tell(worker="n0.0", message=Finish()), 100)
    link.heard_s = 116
    assert link.is_stalled(116, 15)
    link.confirm(1, 116)
    assert not link.is_stalled(116, 15)
    with pytest.raises(ValueError, match="the newest one is 1"):
        link.confirm(2, 116)


def test_a_port_that_is_announced_and_does_not_answer_is_said(gate: Gate, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        open_port = there.getsockname()[1]
        with gate.visit(gate.join(), relay=Relay(host="127.0.0.1", port=open_port, word="0" * 16)) as agent:
            agent.sync()
            there.settimeout(20)
            there.accept()[0].close()
    shut = Relay(host="127.0.0.1", port=open_port, word="0" * 16)
    with gate.visit(relay=shut) as agent:
        agent.sync()
        said: list[str] = []

        def is_said() -> bool:
            said.append(capfd.readouterr().err)
            return "announces" in "".join(said)

        wait_for(is_said, 20)
    [line] = [line for line in "".join(said).splitlines() if "announces" in line]
    assert f"machine {gate.me.node} announces 127.0.0.1:{open_port}, where nothing answers this manager" in line


def test_machines_with_a_port_relay_for_others_and_those_without_workers_before_others(gate: Gate) -> None:
    relays = [Relay(host=f"127.0.0.{number}", port=7000, word=f"{number:016x}") for number in range(3)]
    busy, idle = gate.join(), gate.join()
    with gate.visit(busy, relay=relays[1]) as worker, gate.visit(gate.me) as silent:
        for agent in (worker, silent):
            agent.hear()
        worker.say(Started(worker=f"{busy.node}.0"))
        worker.sync()
        assert gate.door.relays() == (relays[1],)
        with gate.visit(idle, relay=relays[2]) as other:
            other.hear()
            assert gate.door.relays() == (relays[2], relays[1])
