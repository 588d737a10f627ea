"""An agent's own thread: what it survives, and which logs it sends to whom."""

import os
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from varuna.core.devices import DeviceFault
from varuna.core.messages import Failed
from varuna.core.node_notices import MAX_REASON, Preemptible, PreemptionNotice, RebalanceAdvice, ZoneNotice
from varuna.fleet.agent.agent import Agent, AgentConfig
from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
from varuna.fleet.agent.log_forwarder import LogForwarder
from varuna.fleet.agent.manager_client import ManagerAddress, ManagerClient, Trouble, Welcomed
from varuna.fleet.agent.own_departure import OwnDeparture
from varuna.fleet.net.ca import open_authority
from varuna.fleet.net.client import explain
from varuna.fleet.net.protocol import MAX_TAIL, Identity, Parted, ProcessEnded, UpBody, Welcome
from varuna.fleet.state.inputs import ConnectionLost, MessageReceived, WorkerExited
from varuna.fleet.workers.launcher import Launcher


class Bench:
    """An agent whose words are caught, without a manager and without processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[UpBody] = []
        self.told: list[str] = []
        monkeypatch.setattr(ManagerClient, "send", lambda uplink, body, epoch=None: self.sent.append(body))
        authority = open_authority(folder / "tls")
        self.home = AgentFolder(folder / "home")
        self.card = self.identity("n0-vm", authority.fingerprint, authority.certificate_pem)
        (folder / "train.py").touch()
        config = AgentConfig(folder / "train.py", (), 1)
        self.agent = Agent(
            ManagerAddress("h", 1, authority.certificate_pem), self.home, self.card, config, self.told.append
        )

    def identity(self, node: str, fingerprint: str, pem: str = "PEM") -> AgentIdentity:
        return AgentIdentity(identity=Identity(node=node, secret="s"), certificate_pem=pem, fingerprint=fingerprint)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.agent._server.stop()


def welcomed() -> Welcomed:
    return Welcomed(Welcome(manager="m", run="r", resumed=False), epoch=1, interface="127.0.0.1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Workers that would run if there were processes."""
    names: list[str] = []
    monkeypatch.setattr(Launcher, "spawn", lambda launcher, name, more: names.append(name))
    return names


def test_words_that_are_too_long_for_a_message_are_cut_and_end_no_agent(bench: Bench, started: list[str]) -> None:
    """A progress bar is one line of hours; a metadata service may answer anything."""
    agent = bench.agent
    agent.happened(welcomed())
    agent.take_next()
    agent.tend(0.0)
    assert started == ["n0-vm.0"]
    agent.happened(WorkerExited("n0-vm.0", -9, "x" * (MAX_TAIL + 5)))
    agent.notify(PreemptionNotice(in_s=5.0, reason="y" * (MAX_REASON + 5)))
    agent.take_next()
    agent.take_next()
    _, ended, noticed = bench.sent
    assert isinstance(ended, ProcessEnded)
    assert ended.exited.stderr_tail == "x" * MAX_TAIL
    assert isinstance(noticed, PreemptionNotice)
    assert noticed.reason == "y" * MAX_REASON


def test_a_message_that_cannot_be_made_is_left_out_and_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnDeparture, "to_say", lambda *_: [PreemptionNotice(in_s=float("inf"), reason="never")])
    bench.agent.notify(PreemptionNotice(in_s=5, reason="spot notice: terminate"))
    bench.agent.take_next()
    assert bench.sent == []
    assert (
        "a message to the manager was dropped because of an internal error (please report it): in_s" in bench.told[-1]
    )


def test_why_the_manager_cannot_be_reached_again_is_said_once_for_each_reason(bench: Bench) -> None:
    expired = str(explain(ssl_error(10), "h:1"))
    heard: list[Welcomed | Trouble] = [
        welcomed(),
        Trouble("the connection broke", was_welcome=True),
        *(Trouble(expired, was_welcome=False) for _ in range(5)),
        Trouble("no manager is listening at h:1.", was_welcome=False),
        welcomed(),
        Trouble("the connection broke", was_welcome=True),
        Trouble(expired, was_welcome=False),
    ]
    for event in heard:
        bench.agent.happened(event)
        bench.agent.take_next()
    assert [text for text in bench.told if "has expired" in text or "listening" in text] == [
        f"{expired} Trying again; workers continue to train.",
        "no manager is listening at h:1. Trying again; workers continue to train.",
        f"{expired} Trying again; workers continue to train.",
    ]


def ssl_error(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError()
    error.verify_code = code
    return error


def test_the_connection_of_a_worker_that_is_not_this_agents_is_nothing_to_tell_the_manager(
    bench: Bench, started: list[str]
) -> None:
    """As one of the run before, whose machine had another name."""
    bench.agent.happened(welcomed())
    bench.agent.take_next()
    bench.agent.tend(0.0)
    for name in ("n1-other.0", *started):
        bench.agent.happened(ConnectionLost(name))
        bench.agent.take_next()
    assert bench.sent[1:] == [Parted(worker="n0-vm.0")]


def test_another_identity_in_the_same_folder_sends_its_own_logs_alone(bench: Bench) -> None:
    """One --state-dir for run after run, as boot scripts have it."""
    (bench.home.logs_of(bench.card) / "n0-vm.0.log").write_bytes(b"old run")
    for other in (bench.identity("n1-vm", bench.card.fingerprint), bench.identity("n0-vm", "f" * 64)):
        folder = bench.home.logs_of(other)
        assert LogForwarder(folder).next_outputs() == []
        (folder / f"{other.identity.node}.0.log").write_bytes(b"new")
        assert [output.data for output in LogForwarder(folder).next_outputs()] == [b"new"]
    kept = {path.name for path in (bench.home.folder / "logs").iterdir()}
    assert f"n0-vm-{'f' * 8}" in kept
    assert len(kept) == 2  # and the one before it


def test_a_folder_that_cannot_be_written_starts_no_worker_and_ends_none(bench: Bench, started: list[str]) -> None:
    """A number that is not written down might be used twice after a restart."""
    agent = bench.agent
    agent.happened(welcomed())
    agent.take_next()

    in_its_way = bench.home.folder / "agent.json.new"
    in_its_way.mkdir()
    agent.tend(0.0)
    assert "agent.json.new is not writable (Is a directory)" in bench.told[-1]
    in_its_way.rmdir()
    agent.tend(29.0)
    assert started == []
    agent.tend(31.0)
    assert started == ["n0-vm.0"]


def test_a_gpu_that_broke_gets_no_worker_for_a_while(bench: Bench, started: list[str]) -> None:
    agent = bench.agent
    agent.happened(welcomed())
    agent.take_next()
    agent.tend(0.0)
    broken = Failed(summary="s", traceback="", fault=DeviceFault(error="ECC"))
    for event in (MessageReceived("n0-vm.0", broken), WorkerExited("n0-vm.0", 1, "")):
        agent.happened(event)
        agent.take_next()
    now_s = time.monotonic()
    agent.tend(now_s + 55)
    assert started == ["n0-vm.0"]
    agent.tend(now_s + 65)
    assert started == ["n0-vm.0", "n0-vm.1"]


def test_old_logs_of_workers_go(bench: Bench) -> None:
    folder = bench.home.logs_of(bench.card)
    for number in range(5):
        (folder / f"n0-vm.{number}.log").touch()
        os.utime(folder / f"n0-vm.{number}.log", (number, number))
    bench.home.prune(bench.card, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["n0-vm.3.log", "n0-vm.4.log"]
    assert folder.stat().st_mode & 0o077 == 0


def test_a_shutdown_that_follows_a_clouds_notice_is_not_impatience(bench: Bench) -> None:
    """Google Cloud and Azure shut a machine down, and so send SIGTERM, within the notice."""
    agent = bench.agent
    agent.notify(PreemptionNotice(in_s=30.0, reason="spot notice: preempted"))
    agent.take_next()
    agent.signalled(signal.SIGTERM)
    agent.take_next()
    assert agent.exit_code is None
    assert [body.reason for body in bench.sent if isinstance(body, PreemptionNotice)] == [
        "spot notice: preempted",
        "received SIGTERM",
    ]
    agent.signalled(signal.SIGTERM)
    agent.take_next()
    assert agent.exit_code == 128 + signal.SIGTERM


def test_that_the_machine_is_a_spot_machine_is_passed_on_once(bench: Bench) -> None:
    for _ in range(2):
        bench.agent.notify(Preemptible())
        bench.agent.take_next()
    assert bench.sent == [Preemptible()]
    bench.agent.notify(PreemptionNotice(in_s=30.0, reason="spot notice: preempted"))
    bench.agent.take_next()
    assert [type(body) for body in bench.sent[1:]] == [Preemptible, PreemptionNotice]  # all of it, as to a new manager


def test_where_the_machine_is_is_passed_on_once(bench: Bench) -> None:
    """The first word counts: the environment's, if it says anything."""
    for zone in ("office/rack-1", "us-east-1/us-east-1a"):
        bench.agent.notify(ZoneNotice(zone=zone))
        bench.agent.take_next()
    assert bench.sent == [ZoneNotice(zone="office/rack-1")]


def test_advice_is_passed_on_once_and_ends_nothing(bench: Bench) -> None:
    for _ in range(2):
        bench.agent.notify(RebalanceAdvice(reason="AWS recommends to rebalance"))
        bench.agent.take_next()
    assert bench.sent == [RebalanceAdvice(reason="AWS recommends to rebalance")]
    assert not bench.agent._departure.is_near
