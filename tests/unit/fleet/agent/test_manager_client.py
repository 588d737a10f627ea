"""An agent's connection when something goes wrong on this side of it."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.unit.fleet.support import join
from tests.waiting import wait_for
from varuna import __version__
from varuna.core.errors import FleetError
from varuna.fleet.agent import manager_client
from varuna.fleet.agent.manager_client import (
    ClientBounds,
    FromUplink,
    ManagerAddress,
    ManagerClient,
    Refused,
    Trouble,
    Welcomed,
)
from varuna.fleet.manager.agent_server import AgentServer
from varuna.fleet.net.ca import SERVER_NAME, CertificateAuthority, client_context, open_authority
from varuna.fleet.net.host_facts import DiskFacts, HostFacts
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.net.protocol import Identity, JobIdentity, Started, Welcome, WorkerSnapshot
from varuna.fleet.net.serving import Serving
from varuna.fleet.net.source import source
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.join_file import keep_join, read_join, renew_join
from varuna.fleet.run_folder.registry import Registry
from varuna.fleet.run_folder.worker_logs import LogKeeper

LIMIT_BYTES = 2**18
pytestmark = pytest.mark.timeout(60)
JOB = JobIdentity(version=__version__, script="train.py", script_sha256="a", args_sha256="b")


class Manager:
    """A real server for agents, over TLS."""

    def __init__(self, folder: Path) -> None:
        self.authority: CertificateAuthority = open_authority(folder)
        self.registry = Registry(folder)
        self.server = AgentServer(
            registry=self.registry,
            certificate_pem=self.authority.certificate_pem,
            manager="m1",
            run="r1",
            post=lambda event: None,
            logs=LogKeeper(folder),
            audit=Audit(lambda event: None),
            write=lambda line: None,
        )
        app = Starlette(routes=self.server.routes())
        self.serving = Serving(port=0, max_frame_bytes=LIMIT_BYTES, tls=self.authority.server_context())
        self.serving.start(app)
        self.identity: Identity = join(self.registry)
        self.heard: queue.SimpleQueue[FromUplink] = queue.SimpleQueue()

    def uplink(
        self,
        snapshots: Callable[[], tuple[WorkerSnapshot, ...]] = lambda: (),
        place: ManagerAddress | None = None,
        **bounds: Any,
    ) -> ManagerClient:
        return ManagerClient(
            place or ManagerAddress("127.0.0.1", self.serving.port, self.authority.certificate_pem),
            self.identity,
            JOB,
            snapshots=snapshots,
            beats=dict,
            host=lambda: HostFacts(disks=(DiskFacts(use="logs", path="/s", free_bytes=1, size_bytes=2),)),
            on_event=self.heard.put,
            on_body=lambda body: None,
            on_confirmed=lambda outputs: None,
            bounds=ClientBounds(**bounds),
        )

    def hears(self) -> FromUplink:
        return self.heard.get(timeout=20)

    def close(self) -> None:
        self.serving.stop()
        self.registry.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


def test_a_manager_of_another_source_is_named_at_once_and_one_of_the_same_is_asked_again(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = SimpleNamespace(model_dump_json=lambda: '{"session": ""}')
    monkeypatch.setattr("varuna.fleet.agent.manager_client.Greet", lambda **fields: unknown)
    mine = source()
    for theirs in (mine, "0.1.0+00000000"):
        monkeypatch.setattr("varuna.fleet.manager.agent_server.source", lambda theirs=theirs: theirs)
        uplink = manager.uplink()
        uplink.start()
        try:
            heard = manager.hears()
        finally:
            uplink.stop(0.0)
        if theirs == mine:
            assert isinstance(heard, Trouble)
            assert heard.reason.startswith("malformed: job: Field required")
        else:
            place = f"127.0.0.1:{manager.serving.port}"
            versions = f"the manager is Varuna {theirs}, this agent {mine}: install the same one on both"
            assert heard == Refused(f"{versions} ({place})")


def test_an_error_that_nobody_foresaw_is_said_and_the_connection_made_again(manager: Manager) -> None:
    faults = iter([ZeroDivisionError("once"), KeyError("twice")])

    def snapshots() -> tuple[WorkerSnapshot, ...]:
        for fault in faults:
            raise fault
        return ()

    uplink = manager.uplink(snapshots)
    uplink.start()
    try:
        assert manager.hears() == Trouble(
            "internal error (please report it): ZeroDivisionError('once')", was_welcome=False
        )
        assert manager.hears() == Trouble("internal error (please report it): KeyError('twice')", was_welcome=False)
        assert isinstance(manager.hears(), Welcomed)
    finally:
        uplink.stop(0.0)


def test_one_that_does_not_go_away_ends_the_agent_instead_of_leaving_it_unheard(manager: Manager) -> None:
    def snapshots() -> tuple[WorkerSnapshot, ...]:
        raise ZeroDivisionError("always")

    uplink = manager.uplink(snapshots, longest_delay_s=0.01)
    uplink.start()
    heard = [manager.hears() for _ in range(5)]
    assert [type(event) for event in heard] == [Trouble] * 4 + [Refused]
    assert "failed with an internal error (please report it): ZeroDivisionError('always')" in heard[-1].reason  # type: ignore[union-attr]
    uplink.stop(0.0)
    assert manager.heard.empty()


def test_one_that_is_refused_again_and_again_asks_ever_less_often_and_then_ends(manager: Manager) -> None:
    """Such as one whose folder has words of another node: it was welcomed, and thrown out, 16 times a second."""
    delays: list[float] = []

    async def note(seconds: float) -> None:
        delays.append(seconds)
        await asyncio.sleep(0.0)

    uplink = manager.uplink(pause=note)
    uplink.start()
    heard: list[FromUplink] = []
    while not heard or not isinstance(heard[-1], Refused):
        heard.append(manager.hears())
        if isinstance(heard[-1], Welcomed):
            uplink.send(Started(worker="n9-other.0"))
    uplink.stop(0.0)
    assert len([event for event in heard if isinstance(event, Welcomed)]) == 20
    assert "speaks for worker n9-other.0" in heard[-1].reason
    assert sum(delays) > 14.0  # half of what the pauses add up to at most: each is drawn between that and all of it


def test_a_frame_that_is_too_large_ends_its_own_connection_and_nobody_elses(manager: Manager) -> None:
    hostile = join(manager.registry)
    uplink = manager.uplink()
    uplink.start()

    async def send_too_much() -> None:
        # With asyncio, as agents do: the synchronous client reads and writes one TLS connection in two threads, which
        # OpenSSL does not allow, and about one handshake in 300 then never ends.
        async with connect(
            f"wss://127.0.0.1:{manager.serving.port}/agent?node={hostile.node}",
            ssl=client_context(manager.authority.certificate_pem),
            server_hostname=SERVER_NAME,
            additional_headers={"Authorization": f"Bearer {hostile.secret}"},
            compression=None,
            proxy=None,
        ) as websocket:
            with contextlib.suppress(ConnectionClosed):  # it need not read all of it
                await websocket.send("x" * (LIMIT_BYTES + 1))
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(websocket.recv(), 20)

    try:
        assert isinstance(manager.hears(), Welcomed)
        asyncio.run(send_too_much())
        assert manager.server.connected == [manager.identity.node]
        assert manager.heard.empty()
    finally:
        uplink.stop(0.0)


def test_a_manager_that_moved_is_found_by_the_join_file_of_its_run(manager: Manager, tmp_path: Path) -> None:
    of_another_run = JoinString(host="127.0.0.1", port=2, fingerprint="ab" * 32, token="t" * 20)
    file = keep_join(tmp_path, str(of_another_run))
    uplink = manager.uplink(
        place=ManagerAddress("127.0.0.1", 1, manager.authority.certificate_pem, file), longest_delay_s=0.01
    )
    uplink.start()
    try:
        for _ in range(3):
            assert "127.0.0.1:1." in manager.hears().reason  # type: ignore[union-attr]
        ours = of_another_run.model_copy(update={"fingerprint": manager.authority.fingerprint})
        keep_join(tmp_path, str(ours))
        renew_join(tmp_path, "127.0.0.1", manager.serving.port, "ab" * 32)  # of a run that this file is not of
        assert read_join(file) == ours
        renew_join(tmp_path, "127.0.0.1", manager.serving.port, manager.authority.fingerprint)
        while not isinstance(event := manager.hears(), Welcomed):
            assert isinstance(event, Trouble)
        assert uplink.place.port == manager.serving.port
        assert read_join(file).token == ours.token
    finally:
        uplink.stop(0.0)


def test_a_thread_that_does_not_start_is_named(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    uplink = manager.uplink(start_s=0.01)
    with pytest.raises(FleetError, match=r"connection to 127\.0\.0\.1:\d+ did not start within"):
        uplink.start()
    serving = Serving(port=0, max_frame_bytes=1, start_s=0.01)
    with pytest.raises(FleetError, match=r"server at 127\.0\.0\.1:\d+ did not start within"):
        serving.start(Starlette())
    serving.stop()


class Deaf:
    """A manager that was frozen after the handshake: what exceeds the sockets' buffers waits."""

    async def send(self, text: str) -> None:
        await asyncio.Event().wait()


def test_a_greeting_that_nobody_takes_in_has_a_bound(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_client, "connect", lambda *to, **how: contextlib.nullcontext(Deaf()))
    uplink = manager.uplink(open_s=0.02)
    uplink.start()
    try:
        heard = manager.hears()
    finally:
        uplink.stop(0.0)
    assert isinstance(heard, Trouble)
    assert "did not answer within" in heard.reason


class Slow:
    """A manager whose answer comes after more messages than may wait for it."""

    def __init__(self, crowd: Callable[[], None]) -> None:
        self._crowd = crowd

    async def send(self, text: str) -> None:
        self._crowd()
        await asyncio.sleep(0)  # until all of it is queued

    async def recv(self) -> str:
        return Welcome(manager="m1", run="r1", resumed=False).model_dump_json()


def test_when_too_much_is_said_before_the_manager_answers_everything_is_told_on_the_next_connection(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is about a session that is over: what came after it would be taken for what the greeting said."""
    uplink = manager.uplink()

    def crowd() -> None:
        for _ in range(8193):
            uplink.send(Started(worker="n0.0"))

    answers = iter([contextlib.nullcontext(Slow(crowd))])
    monkeypatch.setattr(manager_client, "connect", lambda *to, **how: next(answers, None) or connect(*to, **how))
    uplink.start()
    try:
        trouble = manager.hears()
        assert isinstance(trouble, Trouble)
        assert not trouble.was_welcome
        assert "too many messages" in trouble.reason
        assert isinstance(manager.hears(), Welcomed)
    finally:
        uplink.stop(0.0)


def test_a_pulse_carries_the_clock_and_what_the_machine_is_like(manager: Manager) -> None:
    uplink = manager.uplink(pulse_s=0.01)
    uplink.start()
    try:
        wait_for(lambda: "disks" in str(manager.server.hosts()), 20)
        hosts = manager.server.hosts()
    finally:
        uplink.stop(0.0)
    told: Any = hosts[manager.identity.node]
    assert [disk["path"] for disk in told["disks"]] == ["/s"]
    assert -5 < told["clock_ahead_s"] <= 0.01


def test_a_stop_that_comes_when_the_connection_has_just_ended_for_good_begins_nothing(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshots() -> tuple[WorkerSnapshot, ...]:
        raise FleetError("for good")

    uplink, tasks = manager.uplink(snapshots), list[int]()
    shut_down = asyncio.BaseEventLoop.shutdown_asyncgens

    async def stop_then_shut_down(loop: asyncio.BaseEventLoop) -> None:
        """Stop the uplink as a loop does its last work."""
        if threading.current_thread().name == "varuna-uplink":
            with contextlib.suppress(RuntimeError):  # a thread cannot wait for its own end
                uplink.stop(1.0)
            await asyncio.sleep(0)
            tasks.append(len(asyncio.all_tasks()))
        await shut_down(loop)

    monkeypatch.setattr(asyncio.BaseEventLoop, "shutdown_asyncgens", stop_then_shut_down)
    uplink.start()
    assert manager.hears() == Refused("for good")
    uplink.stop(1.0)
    assert tasks == [1], "the one that looks"
