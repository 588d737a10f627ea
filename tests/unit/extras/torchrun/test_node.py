"""torchrun's agents and a manager's real server: who is let in, what is said when a wait is over."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from tests.waiting import wait_for
from varuna.core.errors import UsageError
from varuna.extras.torchrun import handler as torchrun_handler
from varuna.extras.torchrun.entry import handler
from varuna.extras.torchrun.server import TorchrunServer
from varuna.fleet.manager.agent_server import AgentServer
from varuna.fleet.net.ca import open_authority
from varuna.fleet.net.join_string import JOIN_VARIABLE, JoinString
from varuna.fleet.net.serving import Serving
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.registry import Registry
from varuna.fleet.run_folder.worker_logs import LogKeeper
from varuna.fleet.state.inputs import StopRequested

pytestmark = pytest.mark.timeout(60)


class Manager:
    """A real server for torchrun's agents, over TLS."""

    def __init__(self, folder: Path) -> None:
        authority, self.registry = open_authority(folder), Registry(folder)
        self.posted: list[object] = []
        audit = Audit(lambda event: None)
        agents = AgentServer(
            registry=self.registry,
            certificate_pem=authority.certificate_pem,
            manager="m",
            run="r",
            post=lambda event: None,
            logs=LogKeeper(folder),
            audit=audit,
            write=lambda line: None,
        )
        self.torchrun = TorchrunServer(self.registry, audit, self.posted.append, is_new=True)
        self.serving = Serving(port=0, max_frame_bytes=2**18, tls=authority.server_context())
        self.serving.start(Starlette(routes=[*agents.routes(), *self.torchrun.routes()]))
        self.fingerprint = authority.fingerprint

    def join(self, token: str = "") -> str:
        token = token or self.registry.mint()
        return str(JoinString(host="127.0.0.1", port=self.serving.port, fingerprint=self.fingerprint, token=token))

    def close(self) -> None:
        self.serving.stop()
        self.registry.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    monkeypatch.setattr(torchrun_handler, "SpotNotices", lambda warn: NoCloud())
    monkeypatch.setattr("atexit.register", lambda call, *args: call)
    manager = Manager(tmp_path)
    yield manager
    manager.close()


class NoCloud:
    def start(self) -> None:
        pass


def rendezvous(endpoint: str, least: int = 1, most: int = 1, run_id: str = "r", **conf: str) -> RendezvousHandler:
    return handler()(RendezvousParameters("varuna", endpoint, run_id, least, most, join_timeout="1", **conf))


def test_a_world_of_two_nodes_of_the_same_host_shares_a_store_and_ends_the_run(manager: Manager) -> None:
    one, two = (rendezvous(manager.join(), 1, 1), rendezvous(manager.join(), 1, 1))
    found = one.next_rendezvous()
    assert (found.rank, found.world_size, one.num_nodes_waiting()) == (0, 1, 0)
    assert found.bootstrap_store_info is not None
    assert found.bootstrap_store_info.master_addr == "127.0.0.1"
    found.store.set("key", "value")
    first, *_ = manager.torchrun.nodes
    one.shutdown()
    with pytest.raises(SystemExit) as ended:
        two.next_rendezvous()  # a spare, which is not needed any more
    assert ended.value.code == 0
    assert len({first, *manager.torchrun.nodes}) == 2  # one name each
    wait_for(lambda: any(isinstance(event, StopRequested) for event in manager.posted))
    [stop] = [event for event in manager.posted if isinstance(event, StopRequested)]
    assert (stop.reason, stop.exit_code) == ("torchrun: 1 of 1 nodes have finished", 0)


@pytest.mark.nightly
def test_waits_end_and_name_what_was_waited_for(manager: Manager) -> None:
    lonely = rendezvous(manager.join(), 2, 3)
    with pytest.raises(
        RendezvousTimeoutError, match=r"has waited 1 s for 2 nodes, the least of --nnodes; 1 there: n0-"
    ):
        lonely.next_rendezvous()
    manager.serving.stop()
    with pytest.raises(RendezvousTimeoutError, match=r"no manager is listening at 127\.0\.0\.1:\d+.* Waited 1 s"):
        rendezvous(manager.join(), 1, 1).next_rendezvous()


def test_strangers_and_others_are_refused_in_words(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RendezvousConnectionError, match="this token is unknown"):
        rendezvous(manager.join("x" * 20)).next_rendezvous()
    first = rendezvous(manager.join())
    first.next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match="its script torchrun --rdzv-id=other differs"):
        rendezvous(manager.join(), run_id="other").next_rendezvous()
    monkeypatch.setattr("varuna.fleet.agent.join.__version__", "0.0.1")
    with pytest.raises(RendezvousConnectionError, match="install the same version here"):
        rendezvous(manager.join()).next_rendezvous()
    first.shutdown()


def test_flags_that_are_wrong_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="neither a JOIN string"):
        rendezvous(str(tmp_path / "missing"))
    monkeypatch.delenv(JOIN_VARIABLE, raising=False)
    with pytest.raises(UsageError, match="is not a JOIN string"):
        rendezvous("")
    with pytest.raises(UsageError, match="has no such setting"):
        rendezvous(f"varuna://{'t' * 20}@h:1/{'ab' * 32}", last_call_timeout="3")
    monkeypatch.setenv(JOIN_VARIABLE, f"varuna://{'t' * 20}@h:1/{'ab' * 32}")
    monkeypatch.setattr(torchrun_handler, "SpotNotices", lambda warn: NoCloud())
    monkeypatch.setattr("atexit.register", lambda call, *args: call)
    rendezvous("")
    assert JOIN_VARIABLE not in os.environ  # workers inherit the rest
